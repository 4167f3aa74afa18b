"""Documents on disk, memory-mapped: what every reader of training data codes against."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from headway.account.errors import UserError
from headway.data import manifest as manifests
from headway.data.manifest import Manifest, Shard

_BLOCK = 4 << 20


@runtime_checkable
class DocumentStore(Protocol):
    """N documents of token ids with a label mask each, in source order, stored whole (never cut at a length).

    ``lengths`` int64 [N] tokens per document. ``trained`` int64 [N] trained tokens per document; the first token is
    never counted, since nothing precedes it. ``vocab_size``: every id is below it. ``fingerprint``: changes when any
    token, mask or boundary changes.
    """

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def trained(self) -> np.ndarray: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Token ids [stop - start] of one document, a zero-copy read-only view (unsigned integers)."""
        ...

    def mask(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """uint8 [stop - start]; 1 where the token must be learned."""
        ...

    def source(self, doc: int) -> tuple[str, int]:
        """The file a document came from and its 1-based line (or record number) there."""
        ...


class ShardFolder:
    """A folder of shards written by `headway data prepare`; a `DocumentStore`.

    Opening reads the manifest and the per-document arrays (32 bytes a document); tokens and masks stay on disk.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._tokens: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        offsets, trained, lines, files = [], [], [], []
        for shard in manifest.shards:
            arrays = {part: _load(path, shard, part) for part in manifests.PARTS}
            _check_shapes(path, shard, arrays)
            self._tokens.append(arrays["tokens"])
            self._masks.append(arrays["mask"])
            offsets.append(np.asarray(arrays["offsets"]))
            trained.append(arrays["trained"])
            lines.append(arrays["lines"])
            files.append(arrays["files"])
        counts = [shard.documents for shard in manifest.shards]
        self._shard = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._start = _concatenate([o[:-1] for o in offsets], np.int64)
        self.lengths = _concatenate([np.diff(o) for o in offsets], np.int64)
        self.trained = _concatenate(trained, np.int64)
        self._lines = _concatenate(lines, np.int64)
        self._files = _concatenate(files, np.int32)

    @classmethod
    def open(cls, path: str | Path) -> ShardFolder:
        """Open a folder of shards.

        Raises:
            UserError: no such folder, no manifest, another version, or a shard that is missing or has another size
                than the manifest says. Contents are not hashed here; `verify` does that.
        """
        folder = Path(path)
        return cls(folder, manifests.read(folder))

    @property
    def vocab_size(self) -> int:
        return self.manifest.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def max_token(self) -> int:
        """The largest token id of any document, -1 when there is none: must be below the model's vocabulary."""
        return max((shard.max_token for shard in self.manifest.shards), default=-1)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._slice(self._tokens, doc, start, stop)

    def mask(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._slice(self._masks, doc, start, stop)

    def source(self, doc: int) -> tuple[str, int]:
        return self.manifest.files[int(self._files[doc])].path, int(self._lines[doc])

    @property
    def size(self) -> int:
        """Bytes of all files that `verify` reads."""
        return self.manifest.rejected.size + sum(f.size for s in self.manifest.shards for f in s.parts.values())

    def verify(self, hashed: Callable[[int], None] | None = None) -> None:
        """Read every file of the folder and compare it with the manifest's hash; ``hashed`` is told bytes read.

        Raises:
            UserError: names the first file that differs.
        """
        parts = [(part_path(self.path, s.name, part), f) for s in self.manifest.shards for part, f in s.parts.items()]
        for file, expected in [*parts, (self.path / manifests.REJECTED, self.manifest.rejected)]:
            if hash_file(file, hashed) != expected.sha256:
                raise UserError(f"{file}: its content is not what the manifest says; prepare the data again")

    def _slice(self, arrays: list[np.ndarray], doc: int, start: int, stop: int | None) -> np.ndarray:
        length = int(self.lengths[doc])
        stop = length if stop is None else stop
        # A slice past the end would silently hand out the next document's tokens.
        if not 0 <= start <= stop <= length:
            raise IndexError(f"document {doc} has {length} tokens, asked for [{start}:{stop}]")
        base = int(self._start[doc])
        return arrays[self._shard[doc]][base + start : base + stop]


def is_store(path: str | Path) -> bool:
    """Whether `open_store` would find something at `path`: a folder with a manifest, or a Megatron pair."""
    path = Path(path)
    prefix = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
    return (path / manifests.NAME).is_file() or (not path.is_dir() and prefix.with_name(prefix.name + ".idx").is_file())


def open_store(path: str | Path) -> DocumentStore:
    """Open a folder of shards, or a Megatron data set given as the prefix of its ``.bin`` and ``.idx`` files.

    Raises:
        UserError: neither is there, or what is there cannot be read.
    """
    path = Path(path)
    prefix = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
    if not path.is_dir() and any(prefix.with_name(prefix.name + suffix).exists() for suffix in (".idx", ".bin")):
        from headway.data.megatron import MegatronStore  # imported here: few runs need it

        return MegatronStore.open(prefix)
    return ShardFolder.open(path)


def part_path(folder: Path, shard: str, part: str) -> Path:
    """Where one array of one shard lies."""
    return folder / f"{shard}.{part}.npy"


def hash_file(path: Path, hashed: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file's content, in hexadecimal. ``hashed`` is told bytes read, every few megabytes.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            if hashed is None:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest, block = hashlib.sha256(), bytearray(_BLOCK)
            while size := file.readinto(block):
                digest.update(memoryview(block)[:size])
                hashed(size)
            return digest.hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _load(folder: Path, shard: Shard, part: str) -> np.ndarray:
    path = part_path(folder, shard.name, part)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path}: missing, though the manifest lists it; prepare the data again") from None
    if size != shard.parts[part].size:
        raise UserError(
            f"{path}: {size} bytes, the manifest says {shard.parts[part].size}; prepare the data again or restore it"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); prepare the data again or restore it") from None
    return array.view(np.ndarray)  # np.memmap's slicing costs several times a plain view's


def _check_shapes(folder: Path, shard: Shard, arrays: dict[str, np.ndarray]) -> None:
    documents, tokens = shard.documents, shard.tokens
    expected = {"tokens": tokens, "mask": tokens, "offsets": documents + 1}
    for part, array in arrays.items():
        if array.shape != (expected.get(part, documents),):
            path = part_path(folder, shard.name, part)
            raise UserError(f"{path}: shape {array.shape} does not fit {documents} documents; prepare the data again")


def _concatenate(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype=dtype) for a in arrays]) if arrays else np.zeros(0, dtype)
