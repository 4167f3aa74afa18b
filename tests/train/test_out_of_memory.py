"""Out of memory on one rank only: all ranks go on together on the next level, and the curve is what it was."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from guard.guard_helpers import on_ranks, run_ranks
from headway.account.errors import UserError
from headway.config.optim import OptimConfig
from headway.config.train import LossConfig
from headway.data.batch import Batch
from headway.data.global_batch import Position
from headway.data.split import split_batch
from headway.guard.process_group import control
from headway.model import forward as forward_module
from headway.model.load import load_model
from headway.model.recompute import set_recompute
from headway.parallel.mesh import Layout, build_mesh
from headway.parallel.out_of_memory import Collectives, is_out_of_memory
from headway.parallel.wrap import wrap
from headway.train.agreement import first_failure
from headway.train.clock import StepClock
from headway.train.memory import Fit
from headway.train.optim import build_optimizers
from headway.train.step import Learner, OutOfMemory
from tiny import config
from train.test_step import make_stream

pytestmark = pytest.mark.timeout(600)
STEPS = 2
LAYERS = 3
WAITED = 17


class Fault:
    """Raises out-of-memory once on one rank, at one place, in one step and micro-batch."""

    def __init__(self, at: str, step: int = 0, micro: int = 0) -> None:
        self.at, self.step, self.micro = at, step, micro
        self.now = self.count = 0
        self.fired = 0

    def due(self) -> bool:
        return self.fired == 0 and self.now == self.step and self.count == self.micro

    def raise_it(self) -> None:
        self.fired += 1
        raise torch.OutOfMemoryError("planted: tried to allocate 3.14 GiB")

    def plant(self, model: nn.Module) -> None:
        """at: forward.N or backward.N (a decoder layer), embedding, head, loss, backward.head, backward.embedding"""
        inner: Any = model
        kind, _, where = self.at.partition(".")
        modules = {"head": inner.lm_head, "embedding": inner.model.embed_tokens, "norm": inner.model.norm}
        modules |= {str(n): layer.mlp.down_proj for n, layer in enumerate(inner.model.layers)}
        if kind == "forward":
            modules[where].register_forward_hook(lambda *_: self.raise_it() if self.due() else None)
        elif kind == "backward":
            modules[where].register_forward_hook(self._in_backward)

    def _in_backward(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad and self.due():
            output.register_hook(lambda grad: self.raise_it() if self.fired == 0 else grad)


@functools.cache
def mesh_of(layout: Layout) -> DeviceMesh | None:
    """Once a process: its groups take longer to make than a step takes."""
    return build_mesh(layout, "cpu")


def curve(
    rank: int, kind: str, at: str | None, micro: int = 0, fixed: bool = False, dropout: float = 0.0
) -> tuple[list[str], list[str], int]:
    """Losses and norms of two steps as exact numbers, what was told, and how often the fault fired on this rank."""
    torch.manual_seed(rank)
    module = load_model(config=config(num_hidden_layers=LAYERS, attention_dropout=dropout), seed=3)
    layout = {"fsdp": Layout(1, 2), "ddp": Layout(2, 1), "hsdp": Layout(2, 2), "one": Layout()}[kind]
    replicas = wrap(module, mesh_of(layout), layout, torch.float32)
    told: list[str] = []
    fit = Fit(
        module,
        ["none"] if fixed else ["none", "selective", 1, "full"],
        most=lambda mine: 1 if fixed else max(control().gather(mine)),
        tell=lambda evidence, action, seconds: told.append(f"{evidence}: {action}"),
    )
    set_recompute(module, "none")
    learner = Learner(
        replicas, build_optimizers(module, OptimConfig(lr=1e-2)), LossConfig(), 1.0, StepClock("cpu"),
        agree=first_failure,
    )  # fmt: skip
    fault = Fault(at or "nowhere", micro=micro)
    if rank == layout.world_size - 1:
        fault.plant(module)
        _plant_in_loss(fault)
    stream = make_stream(sequences=3 * layout.world_size)
    batch = stream.global_batch(Position())
    found: list[str] = []
    for step in range(STEPS):
        fault.now = step

        def work(parts: Sequence[Batch], trained: int = batch.trained_tokens) -> torch.Tensor:
            return learner.update(_Counted(parts, fault), trained)

        found.append(
            "/".join(value.hex() for value in fit.run(work, batch.micro_batches(rank, layout.world_size)).tolist())
        )
        batch = stream.global_batch(batch.next)
    return found, told, fault.fired


class _Counted(list[Batch]):
    """Micro-batches that tell the fault which of them is computed."""

    def __init__(self, parts: Sequence[Batch], fault: Fault) -> None:
        super().__init__(parts)
        self.fault = fault

    def __iter__(self):  # type: ignore[no-untyped-def]
        for index, part in enumerate(list.__iter__(self)):
            self.fault.count = index
            yield part


def _plant_in_loss(fault: Fault) -> None:
    original: Callable[..., Any] = forward_module.loss_sum

    def failing(*args: Any, **kwargs: Any) -> Any:
        if fault.at == "loss" and fault.due():
            fault.raise_it()
        return original(*args, **kwargs)

    forward_module.loss_sum = failing  # type: ignore[attr-defined]


PLACES = [
    ("forward.embedding", 0), ("forward.0", 0), ("forward.1", 1), ("forward.2", 0), ("forward.norm", 1),
    ("forward.head", 0), ("loss", 1), ("backward.head", 0), ("backward.2", 1), ("backward.1", 0), ("backward.0", 1),
    ("backward.embedding", 0),
]  # fmt: skip


def places(kind: str) -> list[tuple[str, int]]:
    """DDP has no collective inside a pass: a few places stand for all."""
    return PLACES if kind == "fsdp" else PLACES[::3]


def several(rank: int, kind: str) -> dict[str, Any]:
    """Every place in one process group: each leaves it fit for the next."""
    gc.freeze()  # freeing memory collects garbage, and the parent process left much to look through
    original = forward_module.loss_sum
    found: dict[str, Any] = {"none": curve(rank, kind, None)}
    for at, micro in places(kind):
        forward_module.loss_sum = original  # type: ignore[attr-defined]
        found[at] = curve(rank, kind, at, micro)
    return found


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_out_of_memory_on_rank_1_only_hangs_nothing_and_changes_no_loss(kind: str) -> None:
    first, second = on_ranks(2, several, kind, timeout=240)
    assert first["none"][0] == second["none"][0] and not first["none"][1]
    for at, _ in places(kind):
        for rank, (losses, told, fired) in enumerate((first[at], second[at])):
            assert fired == rank, f"{at}: the fault is rank 1's alone"
            assert losses == first["none"][0], at
            assert len(told) == 1 and "rank 1" in told[0] and "goes to selective" in told[0], at


def curve_without_finishing(rank: int, kind: str) -> object:
    """Ends itself where the step is not over three seconds after the fault."""
    Collectives.finish = lambda self: None  # type: ignore[method-assign]
    fires = Fault.raise_it

    def raise_it(self: Fault) -> None:
        threading.Timer(3.0, os._exit, (WAITED,)).start()
        fires(self)

    Fault.raise_it = raise_it  # type: ignore[method-assign]
    return curve(rank, kind, "forward.1")


def test_a_planted_rank_that_only_gives_up_leaves_the_others_waiting() -> None:
    outcomes = run_ranks(2, curve_without_finishing, "fsdp")
    codes = [outcome.code for outcome in outcomes]
    assert 0 not in codes, f"without its part in the collectives the step cannot end: {codes}"


def exhausted(rank: int) -> str:
    """Rank 1 never has enough: all ranks end with the same words."""
    Fault.due = lambda self: self.at != "nowhere"  # type: ignore[method-assign]
    try:
        curve(rank, "fsdp", "forward.1" if rank else "nowhere", fixed=True)
    except UserError as error:
        return str(error)
    return "it trained"


def test_when_nothing_smaller_is_left_all_ranks_say_so() -> None:
    first, second = on_ranks(2, exhausted)
    assert first == second
    assert "rank 1: out of memory in forward of a micro-batch of 48 slots" in first and "recompute none" in first


def test_micro_batches_are_cut_when_full_recompute_is_not_enough() -> None:
    module = load_model(config=config(), seed=3)
    told: list[str] = []
    fit = Fit(module, ["full"], most=lambda mine: mine, tell=lambda *words: told.append(words[1]))
    sizes: list[list[int]] = []

    def work(parts: Sequence[Batch]) -> str:
        sizes.append([part.slots for part in parts])
        if max(sizes[-1]) == 48:
            raise OutOfMemory("rank 0: planted")
        return "done"

    stream = make_stream(sequences=3)
    batches = [one for one in stream.global_batch(Position()).micro_batches(0, 1) if len(one.lengths) > 1]
    assert batches and fit.run(work, batches) == "done"
    assert fit.parts > 1 and "cut into 2" in told[0]
    assert fit.run(work, batches) == "done" and len(told) == 1, "the next step starts where this one ended"


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("pack", ["best_fit", "none"])
def test_a_cut_batch_gives_the_same_gradient(pack: str, parts: int) -> None:
    batch = make_stream(pack, sequences=8).global_batch(Position())
    whole = batch.micro_batches(0, 1)
    cut = [part for one in whole for part in split_batch(one, parts)]
    assert len(cut) == parts * len(whole)
    assert sum(part.tokens for part in cut) == batch.tokens
    assert sum(part.trained_tokens for part in cut) == batch.trained_tokens
    found = []
    for batches in (whole, cut):
        module = load_model(config=config(), seed=3)
        learner = Learner(
            wrap(module, None, Layout(), torch.float32), build_optimizers(module, OptimConfig(lr=1e-2)), LossConfig(),
            None, StepClock("cpu"),
        )  # fmt: skip
        learner.learn(batches, batch.trained_tokens)
        found.append(torch.cat([p.grad.flatten().double() for p in module.parameters() if p.grad is not None]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_a_kernels_end_of_memory_is_one_and_other_failures_are_not() -> None:
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
