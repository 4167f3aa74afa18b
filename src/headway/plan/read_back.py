"""Reading a small run back up: the large run's prediction, corrected term by term by what the small one measured.

Where a source cannot tell terms apart (a loop's clock sees gradient traffic inside the backward pass), they are taken
together on both sides. What was measured and never predicted (data, blocking calls, what nothing explains) keeps its
share of the work, since it came with the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.account.account import Account
from headway.account.errors import UserError
from headway.account.tree import UNACCOUNTED
from headway.plan.cluster import find_device
from headway.plan.measured_run import MeasuredRun
from headway.plan.shrink import Shrunk


@dataclass(frozen=True)
class Line:
    """Seconds of one node of the account: the small run predicted and measured, the large one predicted and corrected.

    `ratio` is measured over predicted; where the small run predicts nothing there, that of everything it does predict.
    """

    path: str
    small_predicted: float
    small_measured: float
    ratio: float
    target_predicted: float
    target_corrected: float


@dataclass(frozen=True)
class Corrected:
    lines: tuple[Line, ...]
    step_s: float
    low_s: float
    high_s: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "lines": [vars(line) for line in self.lines],
        }


def correct(shrunk: Shrunk, measured: MeasuredRun) -> Corrected:
    """The target's step as the small run's measurement corrects it; low and high are the spread of its steps."""
    seen = measured.account
    small, target = (_folded(one.account, seen) for one in (shrunk.small, shrunk.target))
    real = {path: seen.total(path) / 1e9 for path in small if seen.sees(path)}
    known = sum(small[path] for path in real)
    overall = sum(real.values()) / known if known else 1.0
    lines = []
    for path in small:
        ratio = real[path] / small[path] if small[path] > 0 and path in real else overall
        measured_s = real.get(path, 0.0)
        lines.append(Line(path, small[path], measured_s, ratio, target[path], target[path] * ratio))
    work = sum(line.target_corrected for line in lines) / max(1e-12, sum(real.values()))
    for path, ns in seen.parts.items():
        if ns and not any(path == known or path.startswith(f"{known}.") for known in small):
            lines.append(Line(path, 0.0, ns / 1e9, work, 0.0, ns / 1e9 * work))
    total = sum(line.target_corrected for line in lines)
    return Corrected(
        tuple(lines), total, total * measured.low_s / measured.step_s, total * measured.high_s / measured.step_s
    )


_REASON = 10.0  # a step that many times off its prediction is of another run, not of a slower machine


def check_small(shrunk: Shrunk, measured: MeasuredRun, parameters: int | None, where: str) -> None:
    """Raises UserError naming what of the measured run is not the small run's: GPUs, device, token slots of a step,
    parameters (each where the measurement says it), or a step far from any reason."""
    small = shrunk.small
    other = []
    if measured.gpus and measured.gpus != small.cluster.gpus:
        other.append(f"{measured.gpus} GPUs, not {small.cluster.gpus}")
    if measured.device and _device(measured.device) != small.cluster.device.name:
        other.append(f"device {measured.device!r}, not {small.cluster.device.name}")
    if measured.slots and abs(measured.slots / small.workload.tokens - 1) > 0.02:
        other.append(f"{measured.slots:,.0f} token slots a step, not {small.workload.tokens:,}")
    if parameters and abs(parameters / small.workload.shape.parameters - 1) > 0.005:
        other.append(f"{parameters:,} parameters, not {small.workload.shape.parameters:,}")
    if other:
        raise UserError(f"{where}: this is not the small run: {'; '.join(other)}")
    ratio = measured.step_s / small.step_s
    if not 1 / _REASON <= ratio <= _REASON:
        raise UserError(
            f"{where}: a step of {measured.step_s:.3g} s, {ratio:.3g} times the {small.step_s:.3g} s predicted: "
            "not the small run, or not a step that could correct anything"
        )


def _device(name: str) -> str | None:
    try:
        return find_device(name).name
    except UserError:
        return None


def _folded(predicted: Account, seen: Account) -> Mapping[str, float]:
    """Predicted seconds at the nodes that the measurement can see."""
    found: dict[str, float] = {}
    for path, ns in predicted.parts.items():
        if path != UNACCOUNTED:
            place = _place(path, seen)
            found[place] = found.get(place, 0.0) + ns / 1e9
    return found


def _place(path: str, seen: Account) -> str:
    top = path.partition(".")[0]
    if path in seen.parts:
        return path
    if top in seen.parts:
        return top
    if top in ("comm", "bubble", "straggler") or path.startswith("compute."):
        # Without a profiler these seconds pass inside the backward pass.
        return next((one for one in ("compute.backward", "compute") if one in seen.parts), path)
    return next((one for one in ("host.other", "host") if top in ("host", "copy") and one in seen.parts), path)
