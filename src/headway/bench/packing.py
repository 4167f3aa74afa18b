"""How fast packs are made and how full they are, beside TRL's best-fit packer where `trl` can be imported.

    python -m headway.bench.packing --documents 1000000 --capacity 8192

Lengths are chat-like: log-normal around 700 tokens, 16 to 8192. Both packers get the same lengths in the same process.
TRL packs token columns, not lengths, so it is given one byte a token (less than any real column), and its time is
printed twice: whole, and without the moving of columns, which leaves its search for packs alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.data.pack import best_fit

_MOVES_COLUMNS = {"filter", "list_slice", "take"}


@dataclass(frozen=True)
class PackingTime:
    """Seconds of each repeat; ``search`` is without moving token columns (the same, where there are none)."""

    name: str
    documents: int
    packs: int
    fill: float
    seconds: tuple[float, ...]
    search: tuple[float, ...]

    def __str__(self) -> str:
        times = " ".join(f"{seconds:.2f}" for seconds in self.seconds)
        return f"{self.name}: {self.documents} documents in {self.packs} packs, {self.fill:.3%} filled, {times} s"


def chat_lengths(documents: int, longest: int = 8192, seed: int = 0) -> np.ndarray:
    """Document lengths (int64) like those of chats: log-normal, median 700 tokens, sigma 1.1, cut to 16..longest."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(700), 1.1, documents))
    return np.clip(drawn, 16, longest).astype(np.int64)


def measure_headway(lengths: np.ndarray, capacity: int, repeats: int) -> PackingTime:
    """Times `headway.data.pack.best_fit`, each repeat as another epoch."""
    seconds = []
    for epoch in range(repeats):
        started = time.perf_counter()
        packs = best_fit(lengths, capacity, epoch=epoch)
        seconds.append(time.perf_counter() - started)
    return PackingTime("headway", len(lengths), len(packs), packs.fill, tuple(seconds), tuple(seconds))


def measure_trl(lengths: np.ndarray, capacity: int, repeats: int) -> PackingTime | None:
    """Times TRL's best-fit decreasing packer on one table of all documents; None where `trl` cannot be imported."""
    try:
        import pyarrow as pa
        from trl import data_utils
    except ImportError:
        return None
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
    table = pa.table({"input_ids": column})
    compute = data_utils.pc
    seconds, search, packs = [], [], 0
    for _ in range(repeats):
        data_utils.pc = moving = _TimedCompute(compute)
        try:
            started = time.perf_counter()
            packs = data_utils._pack_bfd(table, capacity).num_rows
            seconds.append(time.perf_counter() - started)
        finally:
            data_utils.pc = compute
        search.append(seconds[-1] - moving.seconds)
    return PackingTime(
        "trl", len(lengths), packs, int(lengths.sum()) / (packs * capacity), tuple(seconds), tuple(search)
    )


class _TimedCompute:
    """Stands in for `pyarrow.compute` and sums up the time of functions that move token columns."""

    def __init__(self, compute: Any) -> None:
        self._compute = compute
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._compute, name)
        return self._timed(function) if name in _MOVES_COLUMNS else function

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def compare(documents: int, capacity: int, repeats: int, peer_repeats: int) -> list[str]:
    """The lines to print: both packers on the same lengths, and how many times faster Headway is."""
    lengths = chat_lengths(documents, min(capacity, 8192))
    ours = measure_headway(lengths, capacity, repeats)
    peer = measure_trl(lengths, capacity, peer_repeats)
    if peer is None:
        return [str(ours), "trl: cannot be imported here, not compared"]
    whole, search = (min(times) / min(ours.seconds) for times in (peer.seconds, peer.search))
    alone = " ".join(f"{seconds:.2f}" for seconds in peer.search)
    return [
        str(ours),
        f"{peer} (search for packs alone {alone} s)",
        f"headway is {whole:.0f} times as fast, {search:.0f} times against the search alone, best of each; "
        f"packs {ours.packs} against {peer.packs}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headway.bench.packing", description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, default=1)
    options = parser.parse_args()
    for line in compare(options.documents, options.capacity, options.repeats, options.peer_repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
