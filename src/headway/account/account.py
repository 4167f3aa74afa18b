"""A closed account: parts in integer nanoseconds that sum exactly to the wall clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.account.tree import TREES, UNACCOUNTED, Tree


class NotClosed(ValueError):
    """The parts do not fit into the wall clock: some time was counted twice."""


@dataclass(frozen=True)
class Account:
    """Time by category. Build it with :meth:`close`, which computes `unaccounted`.

    Attributes:
        tree: the tree whose paths the parts use.
        wall_ns: the whole, in nanoseconds.
        parts: path to nanoseconds, in tree order, `unaccounted` included. A path that is absent was not *seen*
            by the source, which differs from zero. A node and its child never both appear.
    """

    tree: Tree
    wall_ns: int
    parts: Mapping[str, int]

    def __post_init__(self) -> None:
        for path, ns in self.parts.items():
            if path not in self.tree:
                raise KeyError(f"{path!r} is not a category of the {self.tree.name} account")
            if not isinstance(ns, int) or ns < 0:
                raise NotClosed(f"{path} = {ns!r}: a part is a whole number of nanoseconds, zero or more")
            top, _, leaf = path.partition(".")
            if leaf and top in self.parts:
                raise NotClosed(f"{top!r} and {path!r} both hold time: the same seconds would count twice")
        if sum(self.parts.values()) != self.wall_ns:
            raise NotClosed(f"the parts sum to {sum(self.parts.values())} ns, the wall clock says {self.wall_ns} ns")

    @classmethod
    def close(cls, tree: Tree, wall_ns: int, parts: Mapping[str, int]) -> Account:
        """Closes an account: whatever the parts leave of the wall clock becomes `unaccounted`.

        Raises:
            NotClosed: the parts exceed the wall clock, a part is negative, or a node and its child both hold time.
            KeyError: a path is not in the tree.
        """
        if UNACCOUNTED in parts:
            raise NotClosed("unaccounted is what remains; it cannot be given")
        rest = wall_ns - sum(parts.values())
        if rest < 0:
            raise NotClosed(f"the parts exceed the wall clock by {-rest} ns: some time was counted twice")
        ordered = {path: int(parts[path]) for path in tree.paths() if path in parts}
        unknown = set(parts) - set(ordered)
        if unknown:
            raise KeyError(f"{sorted(unknown)} are not categories of the {tree.name} account")
        return cls(tree, wall_ns, {**ordered, UNACCOUNTED: rest})

    def total(self, path: str) -> int:
        """Nanoseconds in a node and everything below it; 0 when unseen."""
        if path not in self.tree:
            raise KeyError(f"{path!r} is not a category of the {self.tree.name} account")
        return self.parts.get(path, 0) + sum(self.parts.get(child, 0) for child in self.tree.children(path))

    def share(self, path: str) -> float:
        """Share of the wall clock, 0 to 1."""
        return self.total(path) / self.wall_ns if self.wall_ns else 0.0

    def sees(self, path: str) -> bool:
        """Whether the source measured this node or something below it."""
        return path in self.parts or any(child in self.parts for child in self.tree.children(path))

    def __add__(self, other: Account) -> Account:
        return sum_accounts([self, other])

    def __sub__(self, other: Account) -> list[Difference]:
        return difference(self, other)

    def to_dict(self) -> dict[str, Any]:
        return {"tree": self.tree.name, "wall_ns": self.wall_ns, "parts": dict(self.parts)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Account:
        return cls(TREES[value["tree"]], int(value["wall_ns"]), dict(value["parts"]))


@dataclass(frozen=True)
class Difference:
    """One row of a subtraction, at the finest level that both sides can see."""

    path: str
    left_ns: int
    right_ns: int
    seen_by_both: bool

    @property
    def delta_ns(self) -> int:
        return self.left_ns - self.right_ns


def difference(left: Account, right: Account) -> list[Difference]:
    """Subtracts two accounts of one tree. Where one side knows only a node, the other is rolled up to it.

    The rows' deltas sum to the difference of the two wall clocks (a property test checks it).
    """
    if left.tree != right.tree:
        raise ValueError(f"a {left.tree.name} account cannot be subtracted from a {right.tree.name} account")
    rows = []
    for top in left.tree.tops():
        children = left.tree.children(top)
        rolled_up = not children or top in left.parts or top in right.parts
        for path in (top,) if rolled_up else children:
            if left.sees(path) or right.sees(path):
                both = left.sees(path) and right.sees(path)
                rows.append(Difference(path, left.total(path), right.total(path), both))
    return rows


def sum_accounts(accounts: Iterable[Account]) -> Account:
    """Adds accounts of one tree, rolling up where one of them knows only the parent node.

    Raises:
        ValueError: no account, or accounts of different trees.
    """
    items = list(accounts)
    if not items or any(item.tree != items[0].tree for item in items):
        raise ValueError("sum_accounts needs one or more accounts of the same tree")
    tree = items[0].tree
    parts: dict[str, int] = {}
    for top in tree.tops():
        children = tree.children(top)
        rolled_up = not children or any(top in item.parts for item in items)
        for path in (top,) if rolled_up else children:
            if path != UNACCOUNTED and any(item.sees(path) for item in items):
                parts[path] = sum(item.total(path) for item in items)
    return Account.close(tree, sum(item.wall_ns for item in items), parts)


@dataclass(frozen=True)
class RankSpread:
    """One category over the ranks of a step or of a run, in nanoseconds."""

    path: str
    mean_ns: float
    slowest_ns: int
    slowest_rank: int
    fastest_ns: int

    @property
    def spread(self) -> float:
        """(slowest - fastest) / mean; 0 when nobody spent time here."""
        return (self.slowest_ns - self.fastest_ns) / self.mean_ns if self.mean_ns else 0.0


def over_ranks(accounts: Mapping[int, Account]) -> list[RankSpread]:
    """Mean, slowest rank and spread of each category (and of the wall clock, path ``wall``)."""
    if not accounts:
        raise ValueError("over_ranks needs the account of at least one rank")
    rows = [_spread("wall", {rank: item.wall_ns for rank, item in accounts.items()})]
    tree = next(iter(accounts.values())).tree
    for path in tree.paths():
        if any(item.sees(path) for item in accounts.values()):
            rows.append(_spread(path, {rank: item.total(path) for rank, item in accounts.items()}))
    return rows


def _spread(path: str, by_rank: Mapping[int, int]) -> RankSpread:
    slowest = max(by_rank, key=lambda rank: by_rank[rank])
    mean = sum(by_rank.values()) / len(by_rank)
    return RankSpread(path, mean, by_rank[slowest], slowest, min(by_rank.values()))
