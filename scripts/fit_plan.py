"""Fits the planner's constants to published runs and prints the constants file, or cross-validates by stack.

python scripts/fit_plan.py ROWS.csv > src/headway/plan/constants.csv
python scripts/fit_plan.py ROWS.csv --hold-out        # each stack predicted by constants fitted to the others
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from headway.plan.constants import Constants, default_constants, meanings
from headway.plan.fitting import fit, log_errors
from headway.plan.rows import Case, read_cases


def usable(path: Path) -> list[Case]:
    """Rows with a published plan and a speed, not flagged by who collected them; Korthikanti's only judge."""
    cases, _ = read_cases(path)
    rows = [case for case in cases if case.step_s and not case.flag and not case.guessed]
    return [case for case in rows if "Korthikanti" not in case.source]


def print_constants(found: Constants) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("name", "value", "unit", "fitted", "meaning"))
    for item in meanings():
        value = f"{getattr(found, item.name):.4g}"
        writer.writerow((item.name, value, item.unit, "yes" if item.fitted else "no", item.meaning))


def hold_out(cases: Sequence[Case], sweeps: int) -> None:
    everything = []
    for stack in sorted({case.stack for case in cases}):
        rest = [case for case in cases if case.stack != stack]
        kept = [case for case in cases if case.stack == stack]
        found = fit(rest, default_constants(), sweeps)
        errors = [abs(math.expm1(error)) for error in log_errors(kept, found)]
        everything += errors
        print(f"{stack:<20} {len(kept):4d} rows  {summary(errors)}", flush=True)
    print(f"{'all, stack held out':<20} {len(everything):4d} rows  {summary(everything)}")


def summary(errors: Sequence[float]) -> str:
    ordered = sorted(errors)
    middle, tail = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"median {middle:.1%}  p90 {tail:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--hold-out", action="store_true")
    parser.add_argument("--sweeps", type=int, default=12)
    parser.add_argument("--only", default="", help="constants to move, comma separated (default: all that are fitted)")
    options = parser.parse_args()
    cases = usable(options.rows)
    if options.hold_out:
        hold_out(cases, options.sweeps)
        return
    only = [name for name in options.only.split(",") if name]
    found = fit(cases, default_constants(), options.sweeps, lambda line: print(line, file=sys.stderr, flush=True), only)
    by_group = defaultdict(list)
    for case, error in zip(cases, log_errors(cases, found), strict=True):
        by_group[case.group].append(abs(math.expm1(error)))
    for group, errors in sorted(by_group.items()):
        print(f"{' '.join(group):<50} {len(errors):4d} rows  {summary(errors)}", file=sys.stderr)
    every = [error for errors in by_group.values() for error in errors]
    print(f"{'all':<50} {len(every):4d} rows  {summary(every)}", file=sys.stderr)
    print_constants(found)


if __name__ == "__main__":
    main()
