"""Paths built while no card could be had. On CUDA where there is one; `scripts/gpu_check.sh --cpu` runs them on a CPU."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.config.optim import OptimConfig
from headway.config.train import LossConfig
from headway.data.batch import Batch
from headway.data.split import split_batch
from headway.guard import tiers as tiers_module
from headway.guard.checkpoint import CheckpointStore
from headway.guard.spikes.figures import NAMES
from headway.guard.spikes.robust import Range
from headway.guard.spikes.watcher import Limits
from headway.guard.tiers import Tiers
from headway.guard.training_state import capture, restore
from headway.model.forward import real_token_mask
from headway.model.kernels.attention import Kind, attention_case
from headway.model.kernels.measure import choose
from headway.model.kernels.whole import _batch
from headway.model.load import load_model
from headway.parallel.mesh import Layout
from headway.parallel.wrap import wrap
from headway.train.clock import StepClock
from headway.train.compiling import Length, decide
from headway.train.optim import build_optimizers
from headway.train.step import Learner
from headway.train.update_case import update_cases
from tiny import config, run_file
from train.running import losses, run

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA and not os.environ.get("HEADWAY_CHECK_ON_CPU"), reason="needs a GPU")
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
NARROW = torch.bfloat16 if CUDA else torch.float32


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "extra"),
    [
        (4, 1, 64, "plain"),
        (4, 4, 80, "plain"),
        (6, 2, 96, "window"),
        (8, 2, 128, "plain"),
        (8, 2, 128, "window"),
        (8, 2, 128, "softcap"),  # the one that FlexAttention is compiled for
    ],
)
def test_every_path_of_attention_that_is_offered_is_right(heads: int, kv_heads: int, head_dim: int, extra: str) -> None:
    window, softcap = (33 if extra == "window" else None), (5.0 if extra == "softcap" else None)
    kind = Kind(heads, kv_heads, head_dim, head_dim**-0.5, window, softcap, False)
    for lengths in ((8193,), (16,) * 500, (700, 1, 90)):
        slots = 8193 if CUDA else 513
        found = choose(attention_case(kind, slots, lengths, NARROW, DEVICE), 1)
        assert not [(r.name, r.reason) for r in found.results if r.wrong]


def small(**changes: Any) -> nn.Module:
    sizes = config(hidden_size=256, intermediate_size=512, head_dim=64, **changes)
    return load_model(config=sizes, dtype="float32", attention="headway", seed=3).to(DEVICE)


def learner_of(module: nn.Module) -> Learner:
    replicas = wrap(module, None, Layout(), NARROW)
    return Learner(replicas, build_optimizers(module, OptimConfig(lr=1e-2)), LossConfig(), 1.0, StepClock(DEVICE.type))


def limits(highest: float) -> Limits:
    ranges = {name: Range(-math.inf, highest) for name in NAMES}
    return Limits(far=ranges, near=ranges)


def test_the_spike_gate_holds_a_step_back_on_the_device_without_a_host_sync() -> None:
    module = small()
    learner, batch = learner_of(module), _batch(320).to(DEVICE)
    made = learner.update([batch], batch.trained_tokens, limits(math.inf))
    before = [p.detach().clone() for p in module.parameters()]
    if CUDA:
        torch.cuda.set_sync_debug_mode("error")
    try:
        held = learner.update([batch], batch.trained_tokens, limits(-100.0))
        # Cut as after an end of memory, and with the mask that rectangles need.
        after = learner.update(split_batch(batch, 2), batch.trained_tokens, limits(math.inf))
        real_token_mask(batch)
    finally:
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")
    assert [bool(row[3]) for row in (made, held, after)] == [True, False, False], "held until it is released"
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
    learner.release()
    assert bool(learner.update([batch], batch.trained_tokens, limits(math.inf))[3])


def test_what_is_staged_beside_the_next_step_is_the_state_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = tiers_module.HostFile

    def host_file(*given: Any, **options: Any) -> Any:
        made.append(real(*given, **options))
        return made[-1]

    monkeypatch.setattr(tiers_module, "HostFile", host_file)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    tiers = Tiers(CheckpointStore(tmp_path / "checkpoints", "gpu"), tmp_path, device_type=DEVICE.type)
    assert tiers.off == ""

    def step() -> None:
        model(torch.ones(8, 1024, device=DEVICE)).square().mean().backward()
        tiers.fence()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for number in (1, 2, 3):
        expected = [p.detach().clone() for p in model.parameters()]
        assert tiers.save(number, capture(model, [optimizer]), {"step": number}, {})
        step()
        assert tiers.settle(60) and all(event.ok for event in tiers.poll())
        found = tiers.newest()
        assert found is not None and found.ref.step == number
        other = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
        restore(found.store, found.ref, other, [torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)])
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected, strict=True))
    assert made and all(file._pinned == CUDA for file in made), "copies from a GPU need page-locked memory"
    tiers.close(over=True)


def test_compile_auto_decides_from_figures(tmp_path: Path) -> None:
    module = small(num_hidden_layers=3)
    batch: Batch = _batch(320).to(DEVICE)
    long = Length(10**8 if CUDA else 1, 1)
    found = decide(module, batch, long, NARROW, {}, "here", exact=True, plain=lambda: None, fused=lambda: None)
    print(found.line())
    assert "WARNING" not in found.why and "fails" not in found.why
    assert found.eager_s and (not CUDA or found.compiled_s)


def test_the_update_has_no_wrong_candidate() -> None:
    for case in update_cases(small(), OptimConfig(lr=1e-3)):
        found = choose(case, 20)
        assert not any(r.wrong for r in found.results)
        assert not CUDA or case.operation != "optimizer" or found.chosen in ("fused", "eager")


def test_a_loading_process_beside_a_device_gives_the_same_curve(tmp_path: Path) -> None:
    path = run_file(tmp_path, device=DEVICE.type, deterministic=True)
    run(path, "name=thread")
    run(path, "name=process", "data.loader=process")
    assert losses(path, "process") == losses(path, "thread")
