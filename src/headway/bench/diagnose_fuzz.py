"""Damages a trace at random and checks that the reader never fails and never sums what is not there."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.diagnose.facts import RankFacts
from headway.diagnose.job import Options, read_job

_Event = tuple[int, int, str]  # start and end in ns, name
_FLIPS = 4


@dataclass(frozen=True)
class Fuzzed:
    """How many inputs were read whole, read in part, and refused with a message."""

    whole: int
    partial: int
    refused: int

    @property
    def inputs(self) -> int:
        return self.whole + self.partial + self.refused

    def line(self) -> str:
        return (
            f"{self.inputs:,} damaged traces: {self.whole:,} read whole, {self.partial:,} in part, {self.refused:,} "
            "refused with a message; no traceback, no wrong sum"
        )


class WrongSum(AssertionError):
    """The reader failed, or its answer does not follow from the events it kept."""


def make_events(steps: int = 60) -> list[dict[str, Any]]:
    """A launch and a kernel a step, with names that look like JSON, and times with fractions."""
    events: list[dict[str, Any]] = []
    for step in range(steps):
        at = 1000 + step * 50
        thread = {"ph": "X", "pid": 1, "tid": 1}
        events.append({**thread, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 5,
                       "args": {"correlation": step}})  # fmt: skip
        names = ("gemm<{lambda()#1}, {x}>", "void add(float*, [2])", "ncclDevKernel_AllReduce")
        events.append({"ph": "X", "cat": "kernel", "name": names[step % 3], "pid": 0, "tid": 7, "ts": at + 9.5,
                       "dur": 20.25, "args": {"correlation": step, "device": 0, "stream": 7 + step % 2}})  # fmt: skip
    return events


def make_text(form: int) -> bytes:
    """The trace in one of four forms: indented or not, an object or a bare array."""
    events = make_events()
    value = events if form % 4 == 3 else {"schemaVersion": 1, "traceEvents": events, "baseTimeNanoseconds": 5}
    return json.dumps(value, indent=1 if form % 2 else None).encode()


def damage(number: int, seed: int) -> tuple[bytes, int]:
    """One input: cut, with bytes changed, or both; every fifth damaged in its compressed form. And how many bytes
    of its text were changed (none where the compressed form was: a checksum guards that)."""
    rng = random.Random(f"{seed}-{number}")
    whole = make_text(number)
    packed = number % 5 == 4
    text = bytearray(gzip.compress(whole, 1, mtime=0) if packed else whole)
    if number % 2:
        del text[rng.randrange(len(text)) :]
    flips = rng.randrange(_FLIPS + 1) if number % 3 else 0
    for _ in range(flips if text else 0):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text), flips


def fuzz(folder: Path, inputs: int, seed: int = 4) -> Fuzzed:
    """Reads so many damaged traces, written one after the other into `folder`.

    Raises:
        WrongSum: naming the input by number and seed.
    """
    result: Counter[str] = Counter()
    original = Counter(_kernels_of(make_events()))
    path = folder / "trace.json"
    for number in range(inputs):
        text, flips = damage(number, seed)
        path.write_bytes(text)
        try:
            rank = read_job([path], Options(window="gpu")).ranks[0]
        except UserError:
            result["refused"] += 1
            continue
        except Exception as error:
            raise WrongSum(f"input {number} of seed {seed}: {type(error).__name__}: {error}") from error
        check(rank, original, _reach(number, flips), f"input {number} of seed {seed}")
        result["partial" if rank.damage.partial else "whole"] += 1
    return Fuzzed(result["whole"], result["partial"], result["refused"])


def _reach(number: int, flips: int) -> int:
    """How many kernels the flips can have changed. A flip in compressed bytes may change all that follow it."""
    return 10**9 if number % 5 == 4 and flips else flips


def check(rank: RankFacts, original: Counter[_Event], changed: int, what: str) -> None:
    """The account against the kept events, summed one by one; and the kept events against the original ones.

    Raises:
        WrongSum: the sums differ, or more events are unlike all original ones than were changed.
    """
    for device in rank.devices if rank.devices[0].kind == "gpu" else ():
        events = device.events
        kept = [(int(a), int(b), rank.names[n]) for a, b, n in zip(events.start, events.end, events.name, strict=True)]
        foreign = Counter(kept) - original
        if len(rank.devices) == 1 and sum(foreign.values()) > changed:
            raise WrongSum(f"{what}: {sum(foreign.values())} events are like none of the trace, {changed} were changed")
        busy = _union([(start, end) for start, end, _ in kept])
        if device.shares.busy_ns != busy or device.shares.busy_ns + device.shares.idle_ns != device.window.wall_ns:
            raise WrongSum(f"{what}: {device.shares.busy_ns} ns busy, the kept events cover {busy} ns")


def _union(intervals: list[tuple[int, int]]) -> int:
    """Covered length, the obvious way."""
    total, until = 0, -(2**62)
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def _kernels_of(events: list[dict[str, Any]]) -> list[_Event]:
    found = []
    for event in events:
        if event["cat"] == "kernel":
            start = round(event["ts"] * 1000)
            found.append((start, start + round(event["dur"] * 1000), event["name"]))
    return found
