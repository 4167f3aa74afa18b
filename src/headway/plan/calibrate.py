"""Calibration: one factor on the step time per (stack, device, precision), from at most three rows of it.

The factor is the median ratio measured / predicted of those rows, drawn towards 1 by how little they can say: by their
own scatter and number against the spread of stacks (`trust`, a normal prior). A group without rows of its own takes the
factor of its stack's other groups, drawn further; a stack without rows keeps 1.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.account.errors import UserError
from headway.plan.constants import Constants
from headway.plan.predict import predict
from headway.plan.rows import Case, read_cases

Group = tuple[str, str, str]
ROWS_PER_GROUP = 3
# Standard deviations of log(measured / predicted) over the public rows: of stacks against each other, each predicted by
# constants fitted to the others, and of the rows of one stack, device and precision.
BETWEEN, WITHIN = 0.08, 0.08
# How many degrees of freedom the second of them is worth beside the scatter of at most three rows.
_PRIOR_WEIGHT = 2.0
# Another device or precision of the same stack says about as much as its own rows do about the half.
RELATED = 0.5


@dataclass(frozen=True)
class Calibration:
    """Factors by group, with the rows each rests on."""

    factors: Mapping[Group, float]
    rows: Mapping[Group, tuple[str, ...]]

    def factor(self, group: Group) -> float:
        """What a prediction for that group is multiplied by."""
        if group in self.factors:
            return self.factors[group]
        related = [math.log(factor) for known, factor in self.factors.items() if known[0] == group[0]]
        return math.exp(RELATED * statistics.median(related)) if related else 1.0

    def to_dict(self) -> list[dict[str, object]]:
        return [
            {"stack": g[0], "device": g[1], "precision": g[2], "factor": self.factors[g], "rows": list(self.rows[g])}
            for g in sorted(self.factors)
        ]


NONE = Calibration({}, {})


def choose(cases: Sequence[Case]) -> dict[Group, list[Case]]:
    """At most three rows a group, chosen by what they are and never by their errors.

    Rows whose role is calibration come first; else the newest document of the group (the last in the file's order of
    releases is not known, so: the document with most rows), its smallest, middle and largest job in FLOPs a GPU.
    """
    groups: dict[Group, list[Case]] = defaultdict(list)
    for case in cases:
        if case.step_s and not case.flag and not case.oom and not case.guessed:
            groups[case.group].append(case)
    return {group: _three(rows) for group, rows in groups.items()}


def _three(rows: list[Case]) -> list[Case]:
    marked = [case for case in rows if case.role == "calibration"]
    pool = marked or [case for case in rows if case.complete] or rows
    pool = sorted(pool, key=lambda case: (case.work.shape.active_matmul_parameters, case.cluster.gpus, case.row_id))
    if len(pool) <= ROWS_PER_GROUP:
        return pool
    last = len(pool) - 1
    # The quarter points, not the ends: the smallest and the largest model of a table are its odd ones.
    return [pool[place] for place in sorted({round(last * share) for share in (0.25, 0.5, 0.75)})]


def trust(logs: Sequence[float]) -> float:
    """How much of these rows' median is believed, 0 to 1: rows that agree say more than rows that do not."""
    middle, count = statistics.median(logs), len(logs)
    scatter = sum((one - middle) ** 2 for one in logs)
    variance = (_PRIOR_WEIGHT * WITHIN**2 + scatter) / (_PRIOR_WEIGHT + count - 1)
    return BETWEEN**2 / (BETWEEN**2 + variance / count)


def calibrate(cases: Sequence[Case], constants: Constants) -> Calibration:
    """Factors from rows that may be used for it (see `choose`)."""
    factors: dict[Group, float] = {}
    rows: dict[Group, tuple[str, ...]] = {}
    for group, chosen in choose(cases).items():
        logs = [
            math.log((case.step_s or 1) / predict(case.work, case.layout, case.cluster, constants).step_s)
            for case in chosen
        ]
        factors[group] = math.exp(trust(logs) * statistics.median(logs))
        rows[group] = tuple(case.row_id for case in chosen)
    return Calibration(factors, rows)


def load_calibration(path: Path, constants: Constants) -> Calibration:
    """From a rows CSV, or from what `headway plan calibrate --out` wrote. Raises UserError where neither fits."""
    if path.suffix != ".json":
        cases, _ = read_cases(path)
        return calibrate(cases, constants)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        groups = {(item["stack"], item["device"], item["precision"]): item for item in content["groups"]}
        factors = {group: float(item["factor"]) for group, item in groups.items()}
    except FileNotFoundError:
        raise UserError(f"--calibrate {path}: no such file") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--calibrate {path}: not what `headway plan calibrate --out` writes ({error})") from None
    return Calibration(factors, {group: tuple(item.get("rows", ())) for group, item in groups.items()})
