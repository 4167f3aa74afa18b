"""What lies in a folder of checkpoints, for people who look at it. No torch, so that looking takes no second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.guard import layout
from headway.guard.layout import CheckpointRef
from headway.guard.manifest import Damaged, hash_problems, read_manifest, size_problems


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One line of `headway checkpoint list`.

    `parts`: bytes of "model", "optimizer" and "rest"; `created`: UTC, ISO 8601; both empty when the manifest is
    damaged. `verified`: True or False after the content was read and hashed, None when only sizes were looked at and
    they are right. `problems`: what is wrong, one line each.
    """

    ref: CheckpointRef
    parts: dict[str, int]
    created: str
    run_id: str
    world_size: int
    verified: bool | None
    problems: tuple[str, ...]


def infos(root: Path, *, verify: bool = False) -> list[CheckpointInfo]:
    """All published checkpoints in `root`, oldest generation first. `verify`: read and hash every byte."""
    return [_info(ref, verify) for ref in layout.published(root)]


def _info(ref: CheckpointRef, verify: bool) -> CheckpointInfo:
    try:
        manifest = read_manifest(ref)
    except Damaged as problem:
        return CheckpointInfo(ref, {}, "", "", 0, False, (str(problem),))
    problems = size_problems(ref.path, manifest)
    if verify and not problems:
        problems = hash_problems(ref.path, manifest, sorted(manifest.files))
    verified = False if problems else (True if verify else None)
    return CheckpointInfo(
        ref, manifest.parts, manifest.created, manifest.run_id, manifest.world_size, verified, tuple(problems)
    )
