"""Compute split into forward, backward, recompute, loss and optimizer, on traces recorded here."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from diagnose.causes import recomputing
from headway.diagnose.diagnosis import diagnose_job
from headway.diagnose.facts import DeviceFacts, RankFacts
from headway.diagnose.job import read_job
from headway.diagnose.phases import FORWARD, RECOMPUTE


def record(path: Path, how: str) -> RankFacts:
    """Three steps of a small network; `how`: plain, or checkpoints of either kind."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)) for _ in range(4)
    ]
    model = torch.nn.ModuleList(blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for step in range(3):
            with record_function(f"ProfilerStep#{step}"):
                x = torch.randn(256, 256, requires_grad=True)
                for block in model:
                    x = block(x) if how == "plain" else checkpoint(block, x, use_reentrant=how == "reentrant")
                torch.nn.functional.cross_entropy(x, torch.zeros(256, dtype=torch.long)).backward()
                optimizer.step()
                optimizer.zero_grad()
    prof.export_chrome_trace(str(path))
    return read_job([path]).ranks[0]


def products(rank: RankFacts, phase: int) -> int:
    """How many matrix products with a bias, which only a forward has, ran in a phase."""
    device = rank.device()
    ops = np.unique(device.events.op[device.phase == phase])
    return [rank.names[number] for number in rank.host.name[ops]].count("aten::addmm")


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_recompute_is_told_from_backward(how: str, tmp_path: Path) -> None:
    rank = record(tmp_path / "t.json", how)
    device: DeviceFacts = rank.device()
    total = device.account.total
    assert total("compute") == device.shares.compute_ns
    assert min(total(f"compute.{name}") for name in ("forward", "backward", "loss", "optimizer")) > 0
    # Three steps of eight products.
    assert products(rank, FORWARD) == 24
    assert products(rank, RECOMPUTE) == {"plain": 0, "reentrant": 24, "not reentrant": 24}[how]
    assert (total("compute.recompute") > 0) == (how != "plain")


class Slow(torch.nn.Module):
    """Python before its first operator, and between that and its last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        x = self.first(x)
        time.sleep(0.006)
        return self.last(x)


def test_a_checkpoints_python_is_recompute_and_no_backward(tmp_path: Path) -> None:
    """On a CPU the node is open all the while, so what lies between the operators is a piece of the node."""
    model, path = Slow(), tmp_path / "t.json"
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for step in range(2):
            with record_function(f"ProfilerStep#{step}"):
                x = torch.randn(8, 16, requires_grad=True)
                checkpoint(model, x, use_reentrant=False).sum().backward()
    recorded.export_chrome_trace(str(path))
    total = read_job([path]).ranks[0].device().account.total
    assert total("compute.recompute") >= 2 * 10_000_000
    finding = next(
        item for item in diagnose_job(read_job([path]), memory_free=0.8).findings if item.name.startswith("recompute")
    )
    # A hook in forward for each one in backward, at most as much host time as there is.
    assert 0 < finding.claims["idle.host"] <= total("host.other")
    assert finding.lower_ns < 2 * 10_000_000 <= finding.upper_ns


def test_an_event_without_a_backward_in_the_trace_has_no_phase(tmp_path: Path) -> None:
    from diagnose.kineto_maker import clean

    device = read_job([clean().write(tmp_path / "t.json.gz")]).ranks[0].device()
    assert "compute" in device.account.parts and (device.phase == -1).all()


def test_a_checkpoints_time_on_a_device(tmp_path: Path) -> None:
    """6 products of 400 µs and 6 flash kernels of 300 µs a step run again, 4 steps."""
    device = read_job([recomputing(True).write(tmp_path / "t.json.gz")]).ranks[0].device()
    assert device.account.total("compute.recompute") == 4 * 6 * 700_000
    assert device.account.total("compute.backward") == 4 * 6 * 800_000
