"""A memory checkpoint of several nodes, put together again from the parts that their memories hold.

Each node holds the part of its own ranks, and a copy of the part of the node before it. After one of them is lost, the
others still hold everything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.guard import layout
from headway.guard.control import Control
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Damaged, Manifest, read_manifest, write_manifest
from headway.guard.peers import PEERS, Peer, fetch_part, verified_part
from headway.guard.writing import rank_file

WHOLE = ".whole"
"""In a node's memory folder: what was put together here, until a new memory checkpoint is published."""


@dataclass(frozen=True, slots=True)
class Part:
    """The files of some ranks of one save. `owner`: the node that wrote it; `node`: the one whose memory it is in."""

    name: str
    step: int
    generation: int
    world_size: int
    ranks: frozenset[int]
    owner: str
    node: str
    size: int


@dataclass(frozen=True, slots=True)
class Memory:
    """This node's folder. `main`: whether this rank acts for the node. `keepers`: where every node's parts are had."""

    root: Path
    node: str
    main: bool
    keepers: dict[str, Peer]


def assemble(control: Control, memory: Memory, nodes: int, before_step: int | None) -> Path | None:
    """Puts the newest save that all nodes' memories together hold into every node's `WHOLE`; returns that folder.

    None when there is none, or when one node alone has it whole in its own memory anyway. Collective; raises
    CheckpointFailed on every rank when it cannot be put together.
    """
    parts = [part for share in control.gather(_here(memory) if memory.main else []) for part in share]
    chosen = choose([part for part in parts if before_step is None or part.step < before_step])
    if not chosen or (nodes == 1 and any(_is_whole(part) and part.owner == part.node for part in chosen[0])):
        return None
    control.on_all(
        lambda: _put_together(memory, chosen) if memory.main else None, CheckpointFailed, (OSError, CheckpointFailed)
    )
    return memory.root / WHOLE


def choose(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of the newest save that is whole: one list for every owner, of the places where its part is."""
    for generation in sorted({part.generation for part in parts}, reverse=True):
        found = [part for part in parts if part.generation == generation]
        covered = frozenset().union(*(part.ranks for part in found))
        if len({part.step for part in found}) == 1 and covered >= set(range(found[0].world_size)):
            owners = dict.fromkeys(part.owner for part in sorted(found, key=lambda part: min(part.ranks)))
            return [[part for part in found if part.owner == owner] for owner in owners]
    return []


def _here(memory: Memory) -> list[Part]:
    found = []
    peers = memory.root / PEERS
    folders = {memory.node: memory.root, **({path.name: path for path in peers.iterdir()} if peers.is_dir() else {})}
    for owner, folder in folders.items():
        for ref in layout.published(folder):
            with contextlib.suppress(Damaged):
                manifest = read_manifest(ref)
                ranks = frozenset(rank for rank in range(manifest.world_size) if rank_file(rank) in manifest.files)
                if ranks:
                    found.append(
                        Part(
                            ref.name, ref.step, ref.generation, manifest.world_size, ranks, owner, memory.node,
                            manifest.size,
                        )
                    )  # fmt: skip
    return found


def _is_whole(part: Part) -> bool:
    return len(part.ranks) == part.world_size


def _put_together(memory: Memory, chosen: Sequence[Sequence[Part]]) -> None:
    whole = memory.root / WHOLE
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    first = chosen[0][0]
    target = whole / f".making-{first.name}"
    target.mkdir()
    missing = sum(places[0].size for places in chosen if all(part.node != memory.node for part in places))
    free = shutil.disk_usage(memory.root).free
    if free < missing + missing // 10:
        raise CheckpointFailed(
            f"{first.name}: too little memory to put it together: {missing / 1e6:,.0f} MB needed, "
            f"{free / 1e6:,.0f} MB free in {memory.root}"
        )
    files: dict[str, object] = {}
    manifest: Manifest | None = None
    for places in chosen:
        folder, part = _one_of(memory, places, whole)
        for name in part.files:
            if name not in files:  # every node has a writer.json
                os.link(folder / name, target / name)
        files = {**part.files, **files}
        manifest = manifest or part
    assert manifest is not None
    sizes = sum(entry.size for entry in files.values())  # type: ignore[attr-defined]
    known = {part: size for part, size in manifest.parts.items() if part != "rest"}
    whole_manifest = msgspec.structs.replace(
        manifest, files=files, parts={**known, "rest": max(0, sizes - sum(known.values()))}
    )
    write_manifest(target, whole_manifest)
    target.rename(whole / first.name)


def _one_of(memory: Memory, places: Sequence[Part], whole: Path) -> tuple[Path, Manifest]:
    """A sound copy of one owner's part: here if possible, else fetched. Raises CheckpointFailed when none holds."""
    problems = []
    for part in sorted(places, key=lambda part: part.node != memory.node):
        ref = CheckpointRef(_folder(memory, part), part.step, part.generation)
        try:
            if part.node == memory.node:
                return ref.path, verified_part(ref)
            keeper = msgspec.structs.replace(memory.keepers[part.node], node=part.owner)
            into = whole / f".from-{part.node}-of-{part.owner}" / part.name
            return into, fetch_part(keeper, part.name, into)
        except (OSError, CheckpointFailed, KeyError) as problem:
            problems.append(f"in the memory of {part.node}: {problem}")
    raise CheckpointFailed(f"the part of {places[0].owner}: {'; '.join(problems)}")


def _folder(memory: Memory, part: Part) -> Path:
    return (memory.root if part.owner == memory.node else memory.root / PEERS / part.owner) / part.name
