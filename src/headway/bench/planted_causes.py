"""Causes of lost time, each as a loop that has it and one that does not, on one CPU process."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from headway.bench.workbench import Form, Loop


@dataclass(frozen=True)
class Planted:
    """A loop in one of its two forms. tokens: real ones of a step. close: ends what the loop started."""

    step: Callable[[], None]
    tokens: int = 1
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Cause:
    """`finding` must be found in the loop that `make(True)` gives; `make(False)` is its remedy.

    window: steps of a profile, and of a block of measured steps. told: whether the profile's real tokens are given.
    memory_free: share of free memory to tell, for causes that depend on it. sleeps: the cause waits and computes not.
    steady: all steps are alike.
    """

    finding: str
    what: str
    make: Callable[[bool], Planted]
    window: int = 4
    told: bool = False
    memory_free: float | None = None
    sleeps: bool = False
    steady: bool = True


def padding(bad: bool) -> Planted:
    """Eight documents in rows padded to the longest, or the same tokens in full rows."""
    lengths = [128, 20, 36, 60, 15, 84, 30, 11]
    rows = len(lengths) if bad else sum(lengths) // 128
    loop = Loop(Form(rows=rows))
    return Planted(loop.step, tokens=sum(lengths))


def _loading(seconds: Callable[[int], float], ahead: int) -> Planted:
    """Batches that take `seconds(index)` to read (waiting, as for a disk or a network): in the loop, or in a thread
    that works `ahead` batches before it."""
    form = Form()

    def read(index: int) -> Tensor:
        if (wait := seconds(index)) > 0:
            time.sleep(wait)
        return torch.randint(form.vocabulary, (form.rows, form.sequence))

    ready: queue.Queue[Tensor] = queue.Queue(max(1, ahead))
    over = threading.Event()

    def work() -> None:
        for index in itertools.count():
            ready.put(read(index))
            if over.is_set():
                return

    if ahead:
        threading.Thread(target=work, daemon=True, name="loader").start()
    indices = itertools.count()

    def batch() -> Tensor:
        with record_function("enumerate(DataLoader)#planted"):
            return ready.get() if ahead else read(next(indices))

    def close() -> None:
        over.set()
        while not ready.empty():
            ready.get_nowait()

    return Planted(Loop(form, batch).step, close=close)


def starvation(bad: bool) -> Planted:
    """6 ms to read each batch, in the loop or by a thread ahead of it."""
    return _loading(lambda _: 0.006, 0 if bad else 4)


def jitter(bad: bool) -> Planted:
    """One batch in six takes 50 ms to read, in the loop or by a thread with a queue of twelve."""
    return _loading(lambda index: 0.05 if index % 6 == 5 else 0.0, 0 if bad else 12)


def garbage(bad: bool) -> Planted:
    """A collection of everything in each step over 60,000 live objects; or frozen, and the young every third step."""
    loop = Loop(Form())
    kept = [[number] for number in range(60_000)]
    seen = [0]

    def step() -> None:
        seen[0] += 1
        if bad or seen[0] % 3 == 0:
            with record_function("gc.collect"):
                gc.collect(2 if bad else 0)
        loop.step()

    def close() -> None:
        kept.clear()

    return Planted(step, close=close)


def unfused_loss(bad: bool) -> Planted:
    """Logits over 32,768 entries cut to shape and copied, or made once."""
    return Planted(Loop(Form(vocabulary=32_768, rows=1, copied_logits=bad)).step)


def eager_attention(bad: bool) -> Planted:
    """Scores of 512 × 512 a head written out, or never."""
    return Planted(Loop(Form(sequence=512, rows=1, heads=8, sdpa=not bad)).step)


def loop_optimizer(bad: bool) -> Planted:
    """AdamW as a loop over parameters, or one fused call. Small batches, so that the update weighs."""
    return Planted(Loop(Form(rows=1, sequence=32, width=192, fused_optimizer=not bad)).step, tokens=1)


def recompute(bad: bool) -> Planted:
    return Planted(Loop(Form(recompute=bad)).step)


def _mixed(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x) + 0.5 * x


def _mixed_once(x: Tensor) -> Tensor:  # the compiler keeps what it compiled by the code, so each form has its own
    return torch.nn.functional.gelu(x) + 0.5 * x


def recompiling(bad: bool) -> Planted:
    """Another sequence length each step, a function compiled for each (traced, not generated), or once for all.

    Each length comes once, long and short ones in turn: the two forms have not made the same number of steps when they
    are compared, and must not differ in length.
    """
    form = Form()
    loop = Loop(form)
    lengths, at = [64 + 159 * number % 256 for number in range(256)], [0]
    torch._dynamo.config.recompile_limit = 10_000
    compiled = torch.compile(_mixed if bad else _mixed_once, backend="eager", dynamic=not bad)
    loop.forward = lambda ids: compiled(loop.model(ids))

    def step() -> None:
        at[0] += 1
        length = lengths[at[0] % len(lengths)]
        loop.train_on(torch.randint(form.vocabulary, (form.rows, length)))

    return Planted(step)


def checkpoint_stall(bad: bool) -> Planted:
    """Every fifth step writes and syncs 32 MiB in the loop; or none does."""
    loop = Loop(Form())
    seen, folder = [0], tempfile.TemporaryDirectory(prefix="headway-stall-")
    blob = os.urandom(32 << 20)

    def step() -> None:
        seen[0] += 1
        loop.step()
        if bad and seen[0] % 5 == 0:
            with (Path(folder.name) / "checkpoint").open("wb") as file:
                file.write(blob)
                file.flush()
                os.fsync(file.fileno())

    return Planted(step, close=folder.cleanup)


CAUSES: tuple[Cause, ...] = (
    Cause("padding", "rows padded to the longest → full rows", padding, told=True),
    Cause("data-starvation", "6 ms a batch in the loop → a thread ahead", starvation, sleeps=True, steady=False),
    Cause("data-jitter", "50 ms every sixth batch → a queue of twelve", jitter, window=6, sleeps=True, steady=False),
    Cause("garbage-collection", "gc.collect() each step → young objects every third", garbage, window=3, steady=False),
    Cause("loss-unfused", "logits copied twice → made once", unfused_loss),
    Cause("attention-unfused", "bmm, softmax, bmm → one call", eager_attention),
    Cause("optimizer-not-fused", "AdamW loop → fused", loop_optimizer, window=6),
    Cause("recompute-with-free-memory", "checkpointed blocks → kept", recompute, memory_free=0.8),
    Cause("recompilation-storm", "compiled for each length → once", recompiling, window=6, steady=False),
    Cause(
        "unstable-steps",
        "32 MiB synced every fifth step → none",
        checkpoint_stall,
        window=5,
        sleeps=True,
        steady=False,
    ),
)
