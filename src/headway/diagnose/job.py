"""The front door: trace files in, facts out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.account.errors import UserError
from headway.diagnose.classify import comm_pattern, matched_names
from headway.diagnose.device import device_facts, link
from headway.diagnose.facts import DeviceFacts, JobFacts, RankFacts
from headway.diagnose.gaps import HostWork
from headway.diagnose.hostwork import cpu_facts
from headway.diagnose.nsight import is_sqlite, read_nsight
from headway.diagnose.ranks import compare, with_stragglers
from headway.diagnose.trace import Trace, read_trace
from headway.diagnose.window import WINDOWS, host_steps, main_thread, optimizer_steps


@dataclass(frozen=True)
class Options:
    """How to account.

    Attributes:
        window: ``auto`` (steps where the trace has them), ``steps`` or ``gpu``.
        comm_kernels: regular expressions of further communication kernels.
        workers: processes that decode beside this one; None for as many as a file is worth.
    """

    window: str = "auto"
    comm_kernels: tuple[str, ...] = ()
    workers: int | None = None

    def said(self) -> list[str]:
        """The options that are not as they are by themselves."""
        return ["--window"] * (self.window != "auto") + ["--comm-kernel"] * bool(self.comm_kernels)

    def __post_init__(self) -> None:
        if self.window not in WINDOWS:
            raise UserError(f"--window {self.window!r}: choose one of {', '.join(WINDOWS)}")


def read_job(paths: Sequence[Path], options: Options = Options()) -> JobFacts:
    """Reads every file (one rank each) and accounts it. Raises UserError where a file cannot be used.

    Several files are taken as the ranks of one job, and compared.
    """
    return job_of((read_any(path, options.workers) for path in paths), options)


def job_of(traces: Iterable[Trace], options: Options = Options()) -> JobFacts:
    """The same of traces that were read; each is let go when it is accounted."""
    pattern = comm_pattern(options.comm_kernels)
    ranks = number_ranks([rank_facts(trace, pattern, options) for trace in traces])
    comparison = compare(ranks) if len(ranks) > 1 else None
    if comparison is not None and not comparison.refused:
        ranks = with_stragglers(ranks, comparison)
    notes = [f"{rank.path}: {note}" if len(ranks) > 1 else note for rank in ranks for note in rank.notes]
    return JobFacts(
        ranks=ranks,
        comparison=comparison,
        comm_names=_comm_names(ranks),
        notes=tuple(notes),
    )


def read_any(path: Path, workers: int | None = None) -> Trace:
    """A trace of any kind: Kineto or Chrome JSON, or a Nsight Systems export."""
    return read_nsight(path) if is_sqlite(path) else read_trace(path, workers)


def rank_facts(trace: Trace, comm: re.Pattern[str], options: Options) -> RankFacts:
    """The facts of one file, its rank read from the file or left to `number_ranks` (-1)."""
    rank, source = _rank_of(trace)
    steps, main = host_steps(trace), main_thread(trace)
    inner = steps or optimizer_steps(trace)
    devices: list[DeviceFacts] = []
    if len(trace.gpu):
        linked, work = link(trace), HostWork(trace, main)
        devices = [
            device_facts(trace, rank, device, linked, work, steps, inner, comm, options.window)
            for device in np.unique(trace.gpu.device).tolist()
        ]
    else:
        devices = [cpu_facts(trace, rank, main, steps, inner, comm)]
    distributed = trace.metadata.get("distributedInfo")
    world = distributed.get("world_size") if isinstance(distributed, dict) else None
    return RankFacts(
        path=str(trace.path),
        rank=rank,
        rank_source=source,
        world_size=world if isinstance(world, int) else None,
        base_ns=trace.base_ns,
        devices=tuple(devices),
        host=trace.host,
        names=trace.names,
        threads=trace.threads,
        shapes=trace.shapes,
        damage=trace.damage,
        metadata=trace.metadata,
        notes=trace.notes,
    )


_RANK_IN_NAME = re.compile(r"(?:rank|worker|_r)[-_.]?(\d{1,6})", re.IGNORECASE)


def _rank_of(trace: Trace) -> tuple[int, str]:
    distributed: Any = trace.metadata.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    if isinstance(rank, int) and rank >= 0:
        return rank, "distributedInfo"
    if match := _RANK_IN_NAME.search(trace.path.name):
        return int(match[1]), "file name"
    return -1, "order"


def number_ranks(ranks: Iterable[RankFacts]) -> tuple[RankFacts, ...]:
    """Gives every file a rank of its own: what it says, else its name, else its place in the order (and says so)."""
    read = list(ranks)
    said = [rank.rank for rank in read]
    if len(read) == 1:
        return (_with_rank(read[0], max(said[0], 0), read[0].rank_source, ""),)
    if len(set(said)) == len(said) and min(said) >= 0:
        return tuple(sorted(read, key=lambda rank: rank.rank))
    why = "some files do not say their rank" if min(said) < 0 else "two files say the same rank"
    return tuple(
        _with_rank(rank, place, "order", f"rank {place} by the order of the files: {why}")
        for place, rank in enumerate(read)
    )


def _with_rank(facts: RankFacts, rank: int, source: str, note: str) -> RankFacts:
    devices = tuple(
        replace(device, collectives=tuple(replace(item, rank=rank) for item in device.collectives))
        for device in facts.devices
    )
    notes = (*facts.notes, note) if note else facts.notes
    return replace(facts, rank=rank, rank_source=source, devices=devices, notes=notes)


def _comm_names(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    found: set[str] = set()
    for rank in ranks:
        for device in rank.devices:
            found.update(matched_names(rank.names, device.events.name, device.events.klass))
    return tuple(sorted(found))
