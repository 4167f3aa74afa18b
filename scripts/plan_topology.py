"""Two checks that `headway plan validate` has no column for: BLOOM's topology sweep, and Korthikanti's eight rows.

python scripts/plan_topology.py ROWS.csv
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

from headway.plan.calibrate import calibrate
from headway.plan.constants import default_constants
from headway.plan.rows import read_cases, read_rows
from headway.plan.validate import Scored, validate_cases

TIE = 1.06  # repeats of one published plan differ by as much


def main() -> None:
    path = Path(sys.argv[1])
    cases, _ = read_cases(path)
    rows = [line.cells for line in read_rows(path)]
    days = {row["row_id"]: (re.search(r"date (\d\d-\d\d)", row["notes"]) or ["", ""])[1] for row in rows}
    judged = [case for case in cases if "Korthikanti" not in case.source]
    scored = validate_cases(cases, (), calibrate(judged, default_constants())).scored
    for name, found in (("no calibration", validate_cases(cases).scored), ("calibrated by the 2021 runs", scored)):
        errors = [abs(one.error or 0) for one in found if "Korthikanti" in one.case.source]
        print(f"Korthikanti, {name}: {len(errors)} rows, mean |error| {sum(errors) / len(errors):.1%}")
    sets: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for one in scored:
        case = one.case
        if "BLOOM-prequel" in case.work.name and case.step_s and not case.flag:
            shape = case.work.shape  # one model, one machine, one day: the source says other pairs do not compare
            sets[case.work.name, len(shape.layers), shape.hidden, case.cluster.gpus, days[case.row_id]].append(one)
    pairs = right = 0
    worst = 0.0
    for items in sets.values():
        for left, other in itertools.combinations(items, 2):
            measured = math.log(per_token(left) / per_token(other))
            if abs(measured) > math.log(TIE):
                pairs += 1
                right += (measured > 0) == (
                    left.predicted_s / left.case.work.tokens > other.predicted_s / other.case.work.tokens
                )
        if len(items) > 2:
            chosen = min(items, key=lambda one: one.predicted_s / one.case.work.tokens)
            worst = max(worst, per_token(chosen) / min(map(per_token, items)) - 1)
    print(f"BLOOM sweep: {right} of {pairs} pairs that differ by more than 6 % in order ({right / pairs:.1%})")
    print(
        f"BLOOM sweep: largest regret of the chosen plan in {sum(len(i) > 2 for i in sets.values())} sets {worst:.1%}"
    )


def per_token(one: Scored) -> float:
    return (one.case.step_s or 0.0) / one.case.work.tokens


if __name__ == "__main__":
    main()
