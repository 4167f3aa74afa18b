"""This node's part of a run's memory tier: its folder, its ranks, and the other nodes that hold copies."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headway.guard import layout, upkeep
from headway.guard.address import own_address
from headway.guard.checkpoint import CheckpointStore
from headway.guard.control import Control
from headway.guard.keeper import Keeper
from headway.guard.layout import CheckpointFailed
from headway.guard.memory import NODE, Owner, memory_root, sweep_abandoned
from headway.guard.parts import WHOLE, Memory, assemble
from headway.guard.peers import PEERS, Peer


@dataclass(slots=True)
class Node:
    """This node: its ranks, whether this one acts for it; and the first rank of every node by name."""

    name: str = ""
    ranks: list[int] = field(default_factory=list)
    main: bool = True
    firsts: dict[str, int] = field(default_factory=dict)


class NodeMemory:
    """Collective at its making, in `newest` and `close`. `store`: None where there is no memory tier, and `off` says
    why. `notes`: what the choice of its folder means, for people. `copies`: whether each node holds a copy of its
    neighbour's part."""

    def __init__(self, control: Control, run_folder: Path, run_id: str, *, copies: bool = True) -> None:
        self._control, self._run_id, self._copies = control, run_id, copies
        self.off = ""
        self.notes: list[str] = []
        self.store: CheckpointStore | None = None
        self.node = self._find_node()
        self._owner: Owner | None = None
        self._keeper: Keeper | None = None
        self._keepers: dict[str, Peer] = {}
        self._open(run_folder)
        if self.store is not None and self.has_peers:
            self._open_keepers(self.store.root, run_folder)

    @property
    def has_peers(self) -> bool:
        """Whether other nodes' parts are copied to this one's memory."""
        return self._copies and len(self.node.firsts) > 1

    def peer(self) -> Peer | None:
        """The keeper of the next node in a ring, told whose part it gets; None for a rank that does not act here."""
        if not self.node.main:
            return None
        names = list(self.node.firsts)
        following = names[(names.index(self.node.name) + 1) % len(names)]
        keeper = self._keepers.get(following)
        return msgspec.structs.replace(keeper, node=self.node.name) if keeper is not None else None

    def newest(self, before_step: int | None) -> tuple[CheckpointStore | None, list[str]]:
        """Where whole memory checkpoints are found: put together from all nodes' parts where one alone has none.
        Collective. Also what kept them from being put together."""
        # Each node's memory holds its own ranks' shards: alone they are no checkpoint.
        alone = self.store if len(self.node.firsts) == 1 else None
        if self.store is None:
            return alone, []
        here = Memory(self.store.root, self.node.name, self.node.main, self._keepers)
        try:
            whole = assemble(self._control, here, len(self.node.firsts), before_step)
        except CheckpointFailed as problem:
            return alone, [f"the nodes' memories: {problem}"]
        return (CheckpointStore(whole, self._run_id), []) if whole is not None else (alone, [])

    def abandon(self, steps_from: int, generation: int) -> list[str]:
        """Deletes what `Tiers.abandon` says, own parts and copies; what could not be deleted."""
        if not self.node.main or self.store is None:
            return []
        shutil.rmtree(self.store.root / WHOLE, ignore_errors=True)
        roots = [self.store.root, *(self.store.root / PEERS).glob("*")]
        return [one for root in roots for one in upkeep.abandon(root, self._run_id, steps_from, generation).left]

    def keep_only(self, names: set[Path]) -> None:
        """Deletes the memory checkpoints of an earlier process or layout."""
        if self.node.main and self.store is not None:
            for ref in layout.published(self.store.root):
                if ref.path not in names:
                    shutil.rmtree(ref.path, ignore_errors=True)
            shutil.rmtree(self.store.root / WHOLE, ignore_errors=True)

    def keep_newest(self) -> None:
        """A run that was killed left its own; the newest stays until a new one is published."""
        if self.node.main and self.store is not None:
            for ref in layout.published(self.store.root)[:-1]:
                shutil.rmtree(ref.path, ignore_errors=True)

    def close(self, *, over: bool) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._owner is not None:
            self._owner.release(remove=over)
            self._owner = None

    def _find_node(self) -> Node:
        names = self._control.gather(os.environ.get(NODE) or socket.gethostname())
        name = names[self._control.rank]
        ranks = [rank for rank, other in enumerate(names) if other == name]
        firsts = {other: names.index(other) for other in dict.fromkeys(names)}
        return Node(name, ranks, ranks[0] == self._control.rank, firsts)

    def _open(self, run_folder: Path) -> None:
        # One rank of a node looks: the others would see what it has claimed meanwhile.
        claims = self._control.gather(memory_root(self._run_id, run_folder) if self.node.main else None)
        claim = claims[self.node.ranks[0]]
        root = claim.root if claim is not None else None
        self.notes = list(dict.fromkeys(one.why for one in claims if one is not None and one.why))

        def own() -> None:
            if root is None:
                raise CheckpointFailed("this machine has no shared memory")
            if self.node.main:
                self._owner = Owner(root, run_folder, self._run_id)
                upkeep.sweep(root, self._run_id)
                sweep_abandoned()

        try:
            self._control.on_all(own, CheckpointFailed, (OSError, CheckpointFailed))
        except CheckpointFailed as problem:
            self.off = f"no memory checkpoints, and saves block: {problem}"
            return
        assert root is not None
        self.store = CheckpointStore(root, self._run_id)

    def _open_keepers(self, root: Path, run_folder: Path) -> None:
        """A keeper on every node, known to all. Without one, that node's copy is missing; nothing else."""
        secret = self._control.broadcast(secrets.token_hex(16))
        mine: Peer | None = None
        if self.node.main:
            with contextlib.suppress(OSError):
                self._keeper = Keeper(root, self.node.name, secret, run_folder)
                address = own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), 9)
                mine = Peer(address=address, port=self._keeper.port, secret=secret, node=self.node.name)
        self._keepers = {peer.node: peer for peer in self._control.gather(mine) if peer is not None}
