"""The ranks side by side: who was slow, and in what."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.account.account import Account, RankSpread, over_ranks
from headway.account.events import RankLine
from headway.account.tree import STEP
from headway.record.folder import RunFolder
from headway.record.jsonl import read_jsonl
from headway.watch.checks import add_up, not_closed, shortened


@dataclass(frozen=True)
class Ranks:
    """Kept steps for which every rank of the last world size has a closed account.

    steps: int64 [S]. wall_ns: int64 [R, S]. parts: path to int64 [R, S] nanoseconds. hosts: rank to host name.
    left_out: kept steps that lack a rank (another world size, a torn line) or do not close.
    """

    steps: NDArray[np.int64]
    wall_ns: NDArray[np.int64]
    parts: dict[str, NDArray[np.int64]]
    spread: tuple[RankSpread, ...]
    hosts: dict[int, str]
    left_out: int
    bad: dict[str, list[tuple[int, str]]]
    problems: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.wall_ns)


def read_ranks(folder: RunFolder, kept: Collection[tuple[int, int]], world_size: int) -> Ranks | None:
    """Reads ranks/*.jsonl. `kept` holds (session, step) of the steps that count. None where there are no files."""
    paths = folder.ranks()
    if not paths:
        return None
    by_step: dict[tuple[int, int], dict[int, RankLine]] = {}
    bad, wrong = {}, []
    for rank, path in paths.items():
        lines = read_jsonl(path, RankLine)
        if lines.bad:
            bad[f"ranks/{path.name}"] = lines.bad
        for line in lines.items:
            if (line.session, line.step) in kept and line.rank < world_size:
                reason = not_closed(line)
                if reason:
                    wrong.append(f"rank {rank}, step {line.step:,}: {reason}")
                else:
                    by_step.setdefault((line.session, line.step), {})[line.rank] = line
    whole = sorted((key for key, lines in by_step.items() if len(lines) == world_size), key=lambda key: key[1])
    table = [[by_step[key][rank] for key in whole] for rank in range(world_size)]
    problems = shortened(wrong, "rank account does not close and its step is left out of the comparison: ")
    return _compare(table, len(kept) - len(whole), bad, problems)


def _compare(
    table: list[list[RankLine]], left_out: int, bad: dict[str, list[tuple[int, str]]], problems: list[str]
) -> Ranks:
    steps = [line.step for line in table[0]] if table else []
    paths = [path for path in STEP.paths() if any(path in line.account for row in table for line in row)]
    accounts: dict[int, Account] = {}
    for rank, row in enumerate(table):
        account, _ = add_up(row)
        if account is not None:
            accounts[rank] = account
    return Ranks(
        steps=np.array(steps, np.int64),
        wall_ns=np.array([[line.wall_ns for line in row] for row in table], np.int64).reshape(len(table), len(steps)),
        parts={
            path: np.array([[line.account.get(path, 0) for line in row] for row in table], np.int64) for path in paths
        },
        spread=tuple(over_ranks(accounts)) if accounts else (),
        hosts={rank: row[-1].host for rank, row in enumerate(table) if row},
        left_out=left_out,
        bad=bad,
        problems=tuple(problems),
    )


def uneven(ranks: Ranks) -> list[RankSpread]:
    """The wall clock, then the categories in which the ranks differ, most nanoseconds first."""
    seen = set(ranks.parts)
    leaves = [row for row in ranks.spread[1:] if row.path in seen and row.slowest_ns > row.fastest_ns]
    return [*ranks.spread[:1], *sorted(leaves, key=lambda row: row.fastest_ns - row.slowest_ns)]
