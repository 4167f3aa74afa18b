"""Training on a CUDA device: the clock, the skipped step, a whole run that is stopped and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway.account.tree import UNACCOUNTED
from headway.guard.cards import card_places, devices_of
from headway.guard.vitals import read_vitals
from headway.guard.vitals_main import has_cards, read_for_ever
from headway.train.clock import StepClock
from headway.train.optim import Optimizers, gradient_norms, scale_gradients
from tiny import config, run_file
from train.running import history, losses, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_clock_charges_the_host_only_with_what_the_device_waited_for() -> None:
    clock = StepClock("cuda")
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    clock.begin_step()
    with clock.phase("compute.forward"):
        torch.cuda._sleep(200_000_000)  # about 100 ms of device time, launched at once
    with clock.phase("data"):
        pass  # hidden: the device is still busy
    clock.end_step()
    hidden = clock.take()
    assert hidden.account.total("compute.forward") > 50e6 > hidden.account.total("data")
    assert sum(hidden.account.parts.values()) == hidden.account.wall_ns
    torch.cuda.synchronize()
    clock.begin_step()
    with clock.phase("data"):
        import time

        time.sleep(0.05)  # the device is idle: this one costs
    with clock.phase("compute.forward"):
        torch.cuda._sleep(1)
    clock.end_step()
    exposed = clock.take()
    assert exposed.account.total("data") > 40e6
    assert exposed.account.total(UNACCOUNTED) < exposed.account.wall_ns


def test_a_step_that_is_not_finite_changes_nothing_without_a_host_sync() -> None:
    layer = torch.nn.Linear(8, 8, device="cuda")
    optimizers = Optimizers([torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)], skips_on_device=True)

    def make_step(poison: bool) -> None:
        optimizers.zero_grad()
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
        if poison:
            layer.weight.grad[0, 0] = float("nan")  # type: ignore[index]
        optimizers.step(torch.isfinite(scale_gradients(gradient_norms(layer), 1.0, None)))

    make_step(poison=False)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizers.items[0].state.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        make_step(poison=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())
    for parameter, values in state.items():
        assert all(torch.equal(optimizers.items[0].state[parameter][key], value) for key, value in values.items())
    make_step(poison=False)
    assert not torch.equal(before["weight"], layer.weight)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_file(
        tmp_path_factory.mktemp("gpu"),
        device="cuda",
        model={"config": config(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)},
        train={"steps": 10, "global_batch_sequences": 4, "precision": "bfloat16"},
        checkpoint={"every": 4},
        deterministic=False,
    )


def test_a_whole_run_closes_its_account_and_resumes_bitwise(path: Path) -> None:
    run(path, "name=whole")
    run(path, "name=half", "train.steps=10", "checkpoint.keep=9")
    for folder in sorted((path.parent / "runs" / "half" / "checkpoints").glob("step-*")):
        if not folder.name.startswith("step-00000004"):
            folder.rename(folder.with_name(f"moved-{folder.name}"))
    run(path, "name=half")
    assert history(path, "half").sessions[-1].start.resumed_from == 4
    assert losses(path, "half") == losses(path, "whole")
    for line in history(path, "whole").kept:
        assert sum(line.account.values()) == line.wall_ns
        assert line.account["compute.forward"] > 0 and line.account["compute.backward"] > 0


def test_bfloat16_follows_float32(path: Path) -> None:
    run(path, "name=wide", "train.precision=float32", "model.attention=sdpa")
    run(path, "name=narrow")
    pairs = zip(history(path, "wide").kept, history(path, "narrow").kept, strict=True)
    assert all(a.nll == pytest.approx(b.nll, rel=0.02) and a.trained_tokens == b.trained_tokens for a, b in pairs)


@pytest.mark.parametrize("level", ["selective", "1", "full", "auto"])
def test_every_recompute_level_follows_none(path: Path, level: str) -> None:
    run(path, "name=keep", "model.recompute=none")
    run(path, f"name=again-{level}", f"model.recompute={level}", "model.offload=activations")
    pairs = zip(history(path, "keep").kept, history(path, f"again-{level}").kept, strict=True)
    assert all(a.nll == pytest.approx(b.nll, rel=1e-3) for a, b in pairs)


@pytest.mark.parametrize("precision", ["float16", "float8"])
def test_narrow_precisions_follow_bfloat16(path: Path, precision: str) -> None:
    run(path, "name=bf16")
    run(path, f"name={precision}", f"train.precision={precision}")
    pairs = zip(history(path, "bf16").kept, history(path, precision).kept, strict=True)
    assert all(a.nll == pytest.approx(b.nll, rel=0.05) for a, b in pairs)


def test_a_real_lack_of_memory_goes_to_the_next_level(path: Path) -> None:
    """The allocator is given less than training without recompute took."""
    run(path, "name=roomy", "model.recompute=none")
    peak = max(line.memory_bytes for line in history(path, "roomy").kept)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.8 * peak / total)
    try:
        run(path, "name=tight", "model.recompute=auto", "model.offload=activations")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(history(path, "tight").kept) == len(history(path, "roomy").kept)


def test_batches_copied_on_their_own_stream_are_whole(path: Path) -> None:
    run(path, "name=ahead", "data.prefetch=3")
    run(path, "name=close", "data.prefetch=1")
    assert losses(path, "ahead") == losses(path, "close")


def test_the_driver_tells_of_the_card_that_a_rank_uses(tmp_path: Path) -> None:
    """NVML itself, not a made one; and a card that goes by its UUID stays that card."""
    if not has_cards():
        pytest.skip("needs pynvml")
    read_for_ever(tmp_path, tmp_path, rounds=1)
    vitals = read_vitals(tmp_path)
    assert (
        vitals is not None and vitals.cards[0].temperature and vitals.cards[0].clock_most and not vitals.cards[0].xids
    )
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    settings = devices_of(card_places("n", 1, {"CUDA_VISIBLE_DEVICES": uuid}))
    seen = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_properties(0).uuid)"]
    done = subprocess.run(seen, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60, check=True)
    assert f"GPU-{done.stdout.strip()}" == uuid
