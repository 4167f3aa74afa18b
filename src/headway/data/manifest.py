"""The record beside the shards: what they were made from, what they hold, and how to check both.

The schema is frozen by a golden-file test (tests/data/test_manifest.py). It holds no time, host or
process count, so that the same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from headway.account.errors import UserError

KIND = "headway-shards"
VERSION = 1
NAME = "manifest.json"
REJECTED = "rejected.jsonl"

#: What a shard is made of: suffix -> what the array holds. All are one-dimensional, little-endian .npy files.
PARTS = {
    "tokens": "token ids of all documents, concatenated (uint8, uint16 or uint32) [T]",
    "mask": "1 where the token must be learned, 0 where it is context (uint8) [T]",
    "offsets": "document d is tokens[offsets[d]:offsets[d + 1]] (int64) [D + 1]",
    "trained": "trained tokens per document, its first token never counted (int64) [D]",
    "lines": "1-based line, or record number, in the source file (int64) [D]",
    "files": "index into the manifest's files (int32) [D]",
}


class FileHash(msgspec.Struct, frozen=True):
    """One file of the folder: its length in bytes and the SHA-256 of its content."""

    size: int
    sha256: str


class Totals(msgspec.Struct, frozen=True):
    """Exact counts. ``untrained`` documents are stored but have no trained token; ``rejected`` records are not."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0
    untrained: int = 0
    rejected: int = 0

    def __add__(self, other: Totals) -> Totals:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Totals(*(a + b for a, b in pairs))


class SourceFile(msgspec.Struct, frozen=True):
    """One source file: its identity, the format it was read as, and what came of it."""

    path: str
    size: int
    sha256: str
    format: str
    totals: Totals


class Shard(msgspec.Struct, frozen=True):
    """One shard. ``max_token`` is the largest token id in it (-1 when it holds no token)."""

    name: str
    documents: int
    tokens: int
    trained: int
    max_token: int
    parts: dict[str, FileHash]


class TokenizerRecord(msgspec.Struct, frozen=True):
    """The tokenizer: where it was read from (so that `inspect` can decode) and a hash of its content."""

    path: str
    sha256: str
    vocab_size: int
    eos_token_id: int | None


class TemplateRecord(msgspec.Struct, frozen=True):
    """The chat template: ``source`` is "tokenizer", a path, or "none"; ``labels`` says where label spans came from."""

    source: str
    sha256: str
    labels: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole record. ``fingerprint`` hashes what the shards hold, not how they were made."""

    kind: str = KIND
    version: int = VERSION
    fingerprint: str
    totals: Totals
    notes: dict[str, int]
    tokenizer: TokenizerRecord
    template: TemplateRecord
    options: dict[str, Any]
    files: list[SourceFile]
    shards: list[Shard]
    rejected: FileHash


def fingerprint(shards: list[Shard], vocab_size: int) -> str:
    """Hash of the documents themselves: tokens, masks and boundaries of every shard, in order."""
    digest = hashlib.sha256(str(vocab_size).encode())
    for shard in shards:
        for part in ("tokens", "mask", "offsets"):
            digest.update(shard.parts[part].sha256.encode())
    return digest.hexdigest()


def encode(manifest: Manifest) -> bytes:
    """The manifest as indented JSON with a final newline, the same bytes for the same content."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def read(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises:
        UserError: the folder is missing, unfinished, of another kind, or of a version this Headway cannot read.
    """
    path = folder / NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_missing(folder)) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        head = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: not a manifest, it is not valid JSON ({error}); prepare the data again") from None
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise UserError(f"{path}: not a manifest of {KIND}; give a folder that `headway data prepare` wrote")
    if head.get("version") != VERSION:
        raise UserError(
            f"{path}: written as version {head.get('version')}, this Headway reads version {VERSION}; "
            "prepare the data again or use the Headway that wrote it"
        )
    try:
        return msgspec.convert(head, Manifest)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: damaged ({error}); prepare the data again") from None


def is_manifest(path: Path) -> bool:
    """Whether a file is such a record, whatever its version."""
    try:
        head = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(head, dict) and head.get("kind") == KIND


def _missing(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder; make it with `headway data prepare SOURCE --tokenizer PATH --out {folder}`"
    if not folder.is_dir():
        return (
            f"{folder}: is a file, not a folder of shards; make one with "
            f"`headway data prepare {folder} --tokenizer PATH --out FOLDER`"
        )
    return f"{folder}: holds no {NAME}, so it is no folder of shards; make one with `headway data prepare`"
