"""Files, folders and globs -> the list of files to read, in a fixed order, each with its container."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headway.account.errors import UserError
from headway.data import manifest as manifests

#: The suffix (under .gz or .zst, if any) -> how the file holds its records.
CONTAINERS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "document",
    ".md": "document",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}

# Written by `datasets` beside its .arrow files; they describe the data and hold none.
_DATASETS_META = {"dataset_info.json", "state.json", "dataset_dict.json"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file. ``container``: jsonl, json, parquet, arrow or document. ``compression``: gzip, zstd or "" (none)."""

    path: Path
    container: str
    compression: str = ""

    def __str__(self) -> str:
        return str(self.path)


def expand(sources: Iterable[str | Path]) -> tuple[list[Source], list[Path]]:
    """The files behind paths, folders and globs, in the order given, sorted within a folder or glob.

    Returns the sources and the files of folders that were passed over: their suffix is not known, or they are pipes.

    Raises:
        UserError: a path is prepared data or does not exist, a glob matches nothing, a named file has an unknown
            suffix, a folder holds nothing readable, or a file is reached twice.
    """
    found: list[Source] = []
    foreign: list[Path] = []
    given = [str(source) for source in ([sources] if isinstance(sources, (str, Path)) else sources)]
    if not given:
        raise UserError("no data given; name a file, a folder or a glob")
    for name in given:
        path = Path(name).expanduser().absolute()
        _refuse_prepared(name, path)
        if path.is_dir():
            inside, passed_over = _folder(path)
            found += inside
            foreign += passed_over
        elif path.exists():
            found.append(_file(path))
        elif glob.has_magic(name):
            matched = sorted(p for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
            if not matched:
                raise UserError(f"{name}: matches no file")
            found += [_file(Path(p)) for p in matched]
        else:
            raise UserError(f"{name}: no such file or folder")
    _refuse_twice(found)
    return found, foreign


def _refuse_prepared(name: str, path: Path) -> None:
    """Tokens are not made into tokens once more; and the record of a folder of shards is no document."""
    if manifests.is_manifest(path / manifests.NAME):
        raise UserError(f"{name}: is prepared already; give it as data.sources in the run file")
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    if path.is_dir() or not any(part.is_file() for part in pair):
        return
    missing = next((part for part in pair if not part.is_file()), None)
    if missing is not None and path in pair:
        raise UserError(f"{name}: a Megatron data set is a .bin and an .idx, and {missing} is missing")
    if missing is None:
        raise UserError(f"{name}: a Megatron data set is read as it is; give {prefix} as data.sources in the run file")


def _file(path: Path) -> Source:
    if not path.is_file():
        # A pipe or device is read once and has no size; opening a pipe that nobody writes waits for ever.
        raise UserError(f"{path}: not a regular file; save what it gives to a file first")
    source = _known(path)
    if source is None:
        raise UserError(
            f"{path}: suffix {path.suffix or 'missing'} is not known; rename it to one of "
            f"{', '.join(sorted(CONTAINERS))}, with .gz or .zst behind it if compressed"
        )
    return source


def _known(path: Path) -> Source | None:
    suffixes = [s.lower() for s in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    suffix = suffixes[-2] if compression and len(suffixes) > 1 else (suffixes[-1] if suffixes else "")
    container = CONTAINERS.get(suffix)
    return Source(path, container, compression) if container else None


def _folder(path: Path) -> tuple[list[Source], list[Path]]:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _datasets_folder(path), []
    found, foreign = [], []
    for file in sorted(p for p in path.rglob("*") if not p.is_dir()):
        if any(part.startswith(".") for part in file.relative_to(path).parts) or file.name in _DATASETS_META:
            continue
        source = _known(file)
        if source and file.is_file():  # a pipe is read once, and opening one that nobody writes waits for ever
            found.append(source)
        else:
            foreign.append(file)
    if not found:
        for file in foreign:
            _refuse_prepared(str(file), file)
        raise UserError(f"{path}: holds no file with one of the suffixes {', '.join(sorted(CONTAINERS))}")
    return found, foreign


def _datasets_folder(path: Path) -> list[Source]:
    """The .arrow files of a folder written by `datasets` (`save_to_disk`), in the order it records."""
    if (path / "dataset_dict.json").is_file():
        splits = _meta(path / "dataset_dict.json").get("splits", [])
        if len(splits) != 1:
            raise UserError(f"{path}: holds the splits {', '.join(splits) or '(none)'}; name one, e.g. {path}/train")
        return _datasets_folder(path / splits[0])
    state = _meta(path / "state.json")
    if state.get("_indices_data_files"):
        raise UserError(f"{path}: its rows are selected by an index; call `flatten_indices()` and save it again")
    files = [path / str(entry["filename"]) for entry in state.get("_data_files", [])]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: missing, though {path / 'state.json'} lists it")
    if not files:
        raise UserError(f"{path}: {path / 'state.json'} lists no data files")
    return [Source(file, "arrow") for file in files]


def _meta(path: Path) -> dict:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def _refuse_twice(found: list[Source]) -> None:
    seen: set[Path] = set()
    for source in found:
        if source.path in seen:
            raise UserError(f"{source.path}: named twice; give it once (weights belong into the run file)")
        seen.add(source.path)
