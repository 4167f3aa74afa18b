"""`headway plan validate`: predicted against measured, row by row, and tables of the error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.plan.calibrate import NONE, Calibration
from headway.plan.constants import Constants, default_constants
from headway.plan.memory import GIB, Memory, memory
from headway.plan.predict import predict
from headway.plan.profile import profile
from headway.plan.rows import Case, Unscored, read_cases


@dataclass(frozen=True)
class Scored:
    """One row: seconds predicted and measured (None where nothing was measured), memory, what was assumed."""

    case: Case
    predicted_s: float
    factor: float
    memory: Memory
    calibrates: bool

    @property
    def error(self) -> float | None:
        """Signed relative error of the step time."""
        return self.predicted_s / self.case.step_s - 1 if self.case.step_s else None

    @property
    def memory_error(self) -> float | None:
        return self.memory.total / GIB / self.case.memory_gib - 1 if self.case.memory_gib else None

    def to_dict(self) -> dict[str, Any]:
        case = self.case
        return {
            "row_id": case.row_id, "source": case.source, "stack": case.stack, "device": case.group[1],
            "precision": case.group[2], "model": case.work.name, "plan": case.layout.describe(),
            "step_s": case.step_s, "predicted_s": self.predicted_s, "error": self.error, "factor": self.factor,
            "memory_gib": case.memory_gib, "predicted_memory_gib": self.memory.total / GIB,
            "memory_error": self.memory_error, "fits": self.memory.fits, "oom": case.oom, "flag": case.flag,
            "complete": case.complete, "used_for_calibration": self.calibrates, "assumed": list(case.assumed),
        }  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """|error| of a set of rows, and the signed median, which shows a bias."""

    name: str
    rows: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True)
class Validation:
    """Every row accounted for: `scored` (predicted), `unscored` (with reasons)."""

    scored: tuple[Scored, ...]
    unscored: tuple[Unscored, ...]
    calibration: Calibration

    def judged(self) -> list[Scored]:
        """Rows that count: measured, not flagged, not used to calibrate."""
        return [one for one in self.scored if one.error is not None and not one.case.flag and not one.calibrates]

    def table(self, by: str = "source") -> list[Spread]:
        """Errors of the judged rows by source, stack, device, precision, model or group, largest sets first."""
        key = KEYS[by]
        sets: dict[str, list[Scored]] = defaultdict(list)
        for one in self.judged():
            sets[key(one.case)].append(one)
        rows = [spread(name, items) for name, items in sets.items()]
        return sorted(rows, key=lambda row: (-row.rows, row.name))

    def headline(self) -> list[Spread]:
        """The sets the targets are stated for."""
        judged = self.judged()
        dense = [o for o in judged if o.case.group[1][:4] in ("A100", "H100") and not profile(o.case.work.shape).moe]
        sets = (
            ("dense on A100 and H100", dense),
            ("plan complete", [one for one in judged if one.case.complete]),
            ("all judged", judged),
        )
        return [spread(name, items) for name, items in sets if items]

    def memory_summary(self) -> dict[str, Any]:
        """Median memory error, how many rows that ran out of memory were foreseen, and false alarms.

        A false alarm needs a row that says what model and plan ran; a guess that does not fit is the guess's fault.
        """
        errors = sorted(abs(one.memory_error) for one in self.scored if one.memory_error is not None)
        oom = [one for one in self.scored if one.case.oom]
        ran = [one for one in self.scored if not one.case.oom and one.case.step_s and not one.case.guessed]
        return {
            "rows": len(errors),
            "median": quantile(errors, 0.5),
            "p90": quantile(errors, 0.9),
            "oom_rows": len(oom),
            "oom_called": sum(not one.memory.fits for one in oom),
            "ran_rows": len(ran),
            "false_oom": sum(not one.memory.fits for one in ran),
        }

    def left_out(self) -> dict[str, list[str]]:
        """Why rows could not be scored, or are left out of the tables, and which; commonest reason first. Every row is
        either judged or here, once."""
        found: dict[str, list[str]] = defaultdict(list)
        for one in self.unscored:
            found[one.reason].append(one.row_id)
        for row in self.scored:
            why = _why_not_judged(row)
            if why:
                found[why].append(row.case.row_id)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def reasons(self) -> Counter[str]:
        """How many rows are left out for each reason."""
        return Counter({reason: len(rows) for reason, rows in self.left_out().items()})


def _why_not_judged(row: Scored) -> str:
    if row.error is None:
        return "ran out of memory, as its notes say" if row.case.oom else "no usable speed is published"
    if row.case.flag:
        return f"flagged: {row.case.flag}"
    return "used to calibrate" if row.calibrates else ""


KEYS: dict[str, Callable[[Case], str]] = {
    "source": lambda case: case.document,
    "stack": lambda case: case.stack,
    "device": lambda case: case.group[1],
    "precision": lambda case: case.group[2],
    "model": lambda case: case.work.name,
    "group": lambda case: " · ".join(case.group),
}


def validate(path: Path, calibration: Calibration = NONE, constants: Constants | None = None) -> Validation:
    """Predicts every row of a CSV. Raises UserError only for a file that cannot be read as one."""
    cases, unscored = read_cases(path)
    return validate_cases(cases, unscored, calibration, constants)


def validate_cases(
    cases: Iterable[Case],
    unscored: Iterable[Unscored] = (),
    calibration: Calibration = NONE,
    constants: Constants | None = None,
) -> Validation:
    """The same of cases that are already read."""
    c = constants or default_constants()
    used = {(group, row) for group, rows in calibration.rows.items() for row in rows}
    scored = []
    failed = list(unscored)
    for case in cases:
        factor = calibration.factor(case.group)
        try:
            seconds = predict(case.work, case.layout, case.cluster, c, factor).step_s
            held = memory(profile(case.work.shape), case.work, case.layout, case.cluster)
        except (ArithmeticError, ValueError) as error:
            reason = f"cannot be predicted: {error}"
            failed.append(Unscored(case.row_id, case.source, reason, case.line, case.file))
            continue
        scored.append(Scored(case, seconds, factor, held, (case.group, case.row_id) in used))
    return Validation(tuple(scored), tuple(failed), calibration)


def spread(name: str, items: Sequence[Scored]) -> Spread:
    """Median and 90th percentile of |error| and the median of the signed error."""
    signed = sorted(one.error for one in items if one.error is not None)
    sizes = sorted(abs(error) for error in signed)
    return Spread(name, len(signed), quantile(sizes, 0.5), quantile(sizes, 0.9), quantile(signed, 0.5))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks; nan of nothing."""
    if not ordered:
        return float("nan")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
