"""The guard on the device: what it gathers, and that it decides as the host does."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headway.guard.spikes.figures import HIGHEST, NAMES, SPREAD, Figures
from headway.guard.spikes.robust import Range
from headway.guard.spikes.watcher import LOGARITHMIC, Limits
from headway.train.figures import LEAST_LABELS, Documents, inside, limits_on

VALUE = st.sampled_from([-6.0, -2.0, 0.0, 2.0, 6.0])
RANGES = st.fixed_dictionaries(
    {name: st.sampled_from([Range(), Range(-3.0, 3.0), Range(-1.0, 1.0), Range(-3.0, 1.0)]) for name in NAMES}
)
SENSELESS = st.fixed_dictionaries({}, optional={HIGHEST: st.just(Range(high=3.0)), SPREAD: st.just(Range(low=-3.0))})


@settings(max_examples=80, deadline=None)
@given(st.lists(VALUE | st.just(math.nan), min_size=6, max_size=6), RANGES, RANGES, SENSELESS)
def test_the_device_holds_back_what_the_host_calls_a_spike(values, far, near, senseless) -> None:
    limits = Limits(far, near, senseless)
    own = {name: value for name, value in zip(NAMES, values, strict=True)}
    device = {name: torch.tensor(math.exp(value) if name in LOGARITHMIC else value) for name, value in own.items()}
    known = {name: value for name, value in own.items() if not math.isnan(value)}
    assert bool(inside(device, limits_on(limits, torch.device("cpu")))) is (limits.beyond(known) == {})


class _Copied(TorchDispatchMode):
    """What a list or a number of the host's is made of on its way into a tensor."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [str(func)] if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.index.Tensor) else []
        return func(*args, **(kwargs or {}))


def test_the_gate_copies_nothing_from_the_host() -> None:
    """On a GPU a list as an index is a copy that the host waits for, in every step."""
    values = {name: torch.ones(()) for name in NAMES}
    limits = limits_on(Limits({}, {}, {}), torch.device("cpu"))
    with _Copied() as planted:
        limits[1][[0, 1]].any()
    assert planted.found, "the fault is seen"
    with _Copied() as copied:
        inside(values, limits)
    assert copied.found == []


def test_extremes_of_documents_are_those_of_each_alone() -> None:
    dice = np.random.default_rng(0)
    parts = [dice.exponential(2.0, size) for size in (40, 12, LEAST_LABELS - 1, 30)]
    parts.append(np.full(25, 2.9))  # one word, over and over
    each = torch.tensor(np.concatenate(parts), dtype=torch.float32)
    bounds = torch.tensor(np.cumsum([0, *map(len, parts)]), dtype=torch.int32)
    batch = SimpleNamespace(labels=torch.zeros(len(each), dtype=torch.long), cu_seqlens=bounds, documents=np.arange(5))
    found = Documents(torch.device("cpu"))
    found.add(SimpleNamespace(each=each), batch)  # type: ignore[arg-type]
    highest, lowest, spread = (float(one) for one in found.extremes())
    long = [part for part in parts if len(part) >= LEAST_LABELS]
    assert highest == pytest.approx(max(part.mean() for part in long), rel=1e-5)
    assert lowest == pytest.approx(min(part.mean() for part in long), rel=1e-5)
    assert spread < 2e-3, "the word's losses are equal but for rounding"
    even = Documents(torch.device("cpu"))
    batch.cu_seqlens = bounds[:3]
    even.add(
        SimpleNamespace(each=each[: bounds[2]]), SimpleNamespace(**{**vars(batch), "labels": batch.labels[: bounds[2]]})
    )  # type: ignore[arg-type]
    reference = min(part.std() / part.mean() for part in long[:2])
    assert float(even.extremes()[2]) == pytest.approx(reference, rel=1e-3)
    assert not math.isnan(Figures(1, 2.0, 1.0, True, spread=spread).watched()[SPREAD])
