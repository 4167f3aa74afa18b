"""`headway bench diagnose-…`: whether what diagnose predicts comes true, and whether its reader withstands damage."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import print_json
from headway.cli.scratch import scratch_folder

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def calibration(
    causes: Annotated[str, typer.Option(help="Findings to plant, comma separated (default: all).")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds of profile, slow block and fast block.", min=3)] = 7,
    json: Json = False,
) -> int:
    """Plant causes in a small CPU loop, predict gains from a profile, remove them, measure. Exit code 1 below 8 of 10.

    Example: headway bench diagnose-calibration --causes padding,loss-unfused
    """
    import sys

    from headway.bench.diagnose_calibration import ENOUGH, calibrate, chosen, lines

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    found = calibrate(chosen(causes), rounds, say)
    print_json([one.record() for one in found]) if json else print("\n".join(lines(found)))
    return 0 if sum(one.holds for one in found) >= ENOUGH * len(found) else 1


def fuzz(
    inputs: Annotated[int, typer.Option(help="Damaged traces to read.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the damage.")] = 4,
    json: Json = False,
) -> int:
    """Read traces with random cuts and changed bytes; fail on a traceback or a sum that the events do not give.

    Example: headway bench diagnose-fuzz --inputs 5000 --seed 7
    """
    from headway.bench.diagnose_fuzz import WrongSum
    from headway.bench.diagnose_fuzz import fuzz as run

    with scratch_folder("fuzz") as folder:
        try:
            found = run(folder, inputs, seed)
        except WrongSum as error:
            print(error)
            return 1
    print_json(asdict(found)) if json else print(found.line())
    return 0


def reader(
    trace: Annotated[Path | None, typer.Argument(help="A trace (default: one is made).", metavar="[TRACE]")] = None,
    megabytes: Annotated[int, typer.Option(help="Size of the trace that is made.", min=1)] = 1000,
    rounds: Annotated[int, typer.Option(help="Rounds in which each reader has its turn.", min=1)] = 3,
    peer_python: Annotated[
        str | None, typer.Option(help="Interpreter that has HolisticTraceAnalysis (`pip install traceinsight`).")
    ] = None,
    json: Json = False,
) -> None:
    """Time the reader against plain decoding of the same bytes, and against HolisticTraceAnalysis beside it.

    Example: headway bench diagnose-reader --megabytes 250 --peer-python hta/bin/python
    """
    from headway.bench.diagnose_reader import compare, write_trace

    with scratch_folder("reader") as folder:
        path = trace or folder / "made.json"
        if trace is None:
            write_trace(path, megabytes * 1_000_000)
        found = compare(path, rounds, peer_python)
    print_json(found.record()) if json else print("\n".join(found.lines()))


def cost(
    run: Annotated[Path, typer.Argument(help="A run folder with periodic traces.", metavar="RUN_DIR")],
    every: Annotated[int, typer.Option(help="Steps between traces to reckon with.", min=1)] = 1000,
    json: Json = False,
) -> None:
    """Print what the account and the periodic trace cost a run, from its records.

    Example: headway bench diagnose-cost runs/mine --every 1000
    """
    from headway.bench.diagnose_cost import cost_of

    found = cost_of(run)
    print_json(found.record(every)) if json else print("\n".join(found.lines(every)))


def register(app: typer.Typer) -> None:
    app.command("diagnose-calibration")(calibration)
    app.command("diagnose-fuzz")(fuzz)
    app.command("diagnose-reader")(reader)
    app.command("diagnose-cost")(cost)
