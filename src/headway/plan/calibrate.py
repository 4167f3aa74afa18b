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
from dataclasses import dataclass, replace
from pathlib import Path

from headway.account.errors import UserError
from headway.plan.constants import Constants
from headway.plan.numbers import Kind
from headway.plan.predict import predict
from headway.plan.rows import Case, Unscored, read_cases

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
    """Factors by group, with the rows each rests on; `skipped` are rows of the file that could not be read."""

    factors: Mapping[Group, float]
    rows: Mapping[Group, tuple[str, ...]]
    skipped: tuple[Unscored, ...] = ()

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

    Of different models where there are: one model's rows err together, and a factor must serve the others too. First
    rows whose role is calibration, then those that publish their whole plan; of a model its middle job, of the models
    those at the quarter points of size.
    """
    groups: dict[Group, list[Case]] = defaultdict(list)
    for case in filter(usable, cases):
        groups[case.group].append(case)
    return {group: _three(rows) for group, rows in groups.items()}


def usable(case: Case) -> bool:
    """Whether a row may calibrate: measured, not flagged, its model and plan not guessed."""
    return bool(case.step_s) and not case.flag and not case.oom and not case.guessed


def _three(rows: list[Case]) -> list[Case]:
    marked = [case for case in rows if case.role == "calibration"]
    others = [case for case in rows if case.role != "calibration"]
    others = [case for case in others if case.complete] or others
    chosen = _spread(_one_a_model(marked))
    taken = {case.work.name for case in chosen}
    chosen += _spread(
        [case for case in _one_a_model(others) if case.work.name not in taken], ROWS_PER_GROUP - len(chosen)
    )
    left = [case for case in (*marked, *others) if case not in chosen]
    return chosen + _spread(left, ROWS_PER_GROUP - len(chosen))


def _one_a_model(rows: list[Case]) -> list[Case]:
    models: dict[str, list[Case]] = defaultdict(list)
    for case in sorted(rows, key=_size):
        models[case.work.name].append(case)
    return [cases[len(cases) // 2] for cases in models.values()]


def _spread(rows: list[Case], count: int = ROWS_PER_GROUP) -> list[Case]:
    """At most `count` rows at even shares of the order of sizes, the ends left out: they are a table's odd ones."""
    rows = sorted(rows, key=_size)
    if len(rows) <= count:
        return rows
    last = len(rows) - 1
    return [rows[place] for place in sorted({round(last * (n + 1) / (count + 1)) for n in range(count)})]


def _size(case: Case) -> tuple[int, int, str]:
    return case.work.shape.active_matmul_parameters, case.cluster.gpus, case.row_id


def trust(logs: Sequence[float]) -> float:
    """How much of these rows' median is believed, 0 to 1: rows that agree say more than rows that do not."""
    middle, count = statistics.median(logs), len(logs)
    scatter = sum((one - middle) ** 2 for one in logs)
    variance = (_PRIOR_WEIGHT * WITHIN**2 + scatter) / (_PRIOR_WEIGHT + count - 1)
    return BETWEEN**2 / (BETWEEN**2 + variance / count)


# A run that many times faster or slower than predicted is another run than its row says (a slip of units, mostly).
MOST_APART = 5.0


def calibrate(cases: Sequence[Case], constants: Constants) -> Calibration:
    """Factors from rows that may be used for it (see `choose`); a row `MOST_APART` from its prediction is skipped."""
    factors: dict[Group, float] = {}
    rows: dict[Group, tuple[str, ...]] = {}
    skipped: list[Unscored] = []
    for group, chosen in choose(cases).items():
        logs: list[float] = []
        used: list[str] = []
        for case in chosen:
            predicted = predict(case.work, case.layout, case.cluster, constants).step_s
            ratio = (case.step_s or 1) / predicted
            if 1 / MOST_APART <= ratio <= MOST_APART:
                logs.append(math.log(ratio))
                used.append(case.row_id)
                continue
            reason = (
                f"its step took {case.step_s:.4g} s, {predicted:.4g} are predicted: too far apart to calibrate by; "
                "look at step_time_s, tokens_per_s_per_gpu, global_batch and gpus"
            )
            skipped.append(Unscored(case.row_id, case.source, reason, case.line, case.file))
        if logs:
            factors[group] = math.exp(trust(logs) * statistics.median(logs))
            rows[group] = tuple(used)
    return Calibration(factors, rows, tuple(skipped))


_FACTOR = Kind(1 / MOST_APART, MOST_APART, f"a number between {1 / MOST_APART:g} and {MOST_APART:g}")


def load_calibration(path: Path, constants: Constants) -> Calibration:
    """From a rows CSV, or from what `headway plan calibrate --out` wrote. Raises UserError where neither fits."""
    if path.suffix != ".json":
        cases, skipped = read_cases(path)
        found = calibrate(cases, constants)
        return replace(found, skipped=(*skipped, *found.skipped))
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"--calibrate {path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--calibrate {path}: not JSON ({error})") from None
    try:
        return _from_json(content)
    except ValueError as error:
        what = "not what `headway plan calibrate --out` writes"
        raise UserError(f"--calibrate {path}: {what}: {error}") from None


def is_factors(path: Path) -> bool:
    """Whether a file is what `headway plan calibrate --out` wrote, which the same command may write again."""
    try:
        return bool(_from_json(json.loads(path.read_bytes())).factors)
    except (OSError, ValueError, RecursionError):
        return False


def _from_json(content: object) -> Calibration:
    """Raises ValueError naming the key that is missing or wrong."""
    groups = content.get("groups") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not groups:
        raise ValueError("key 'groups' is missing, or is no list of groups")
    factors: dict[Group, float] = {}
    rows: dict[Group, tuple[str, ...]] = {}
    for place, item in enumerate(groups):
        for key in ("stack", "device", "precision"):
            if not isinstance(item, dict) or not isinstance(item.get(key), str):
                raise ValueError(f"groups[{place}]: key {key!r} is missing, or is no text")
        group = (item["stack"], item["device"], item["precision"])
        factor, used = item.get("factor"), item.get("rows", [])
        try:
            factors[group] = _FACTOR.read(factor)
        except ValueError:
            raise ValueError(f"groups[{place}]: key 'factor' is {factor!r}; give {_FACTOR.says}") from None
        if not isinstance(used, list):
            raise ValueError(f"groups[{place}]: key 'rows' is {used!r}; give a list of row ids")
        rows[group] = tuple(map(str, used))
    return Calibration(factors, rows)
