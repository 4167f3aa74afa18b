"""`headway doctor`: is this machine fit to train on?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.output import print_json

_MARKS = {"good": "✓", "note": "·", "bad": "✗"}


def doctor(
    out: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path("runs"),
    node: Annotated[
        bool, typer.Option("--node", help="Instead put the machine to the test: exact matmuls, memory patterns, links.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="With --node: seconds of matmul on each device.")] = 5.0,
    memory_mib: Annotated[int, typer.Option(help="With --node: memory to test on each device, MiB.", min=1)] = 256,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check versions, devices, exact arithmetic, disk and peak. Exit code 1 when training would fail or be wrong.

    Example: headway doctor --node
    """
    from headway.guard.doctor import examine

    if node:
        from headway.guard.node_check import examine_node

        findings = examine_node(seconds, memory_mib << 20)
    else:
        findings = [*examine(out), _peak()]
    if json:
        print_json([asdict(item) for item in findings])
    else:
        for item in findings:
            print(f"{_MARKS[item.verdict]} {item.check:<12} {item.text}")
    return 1 if any(item.verdict == "bad" for item in findings) else 0


def _peak() -> Any:
    """Whether MFU will be known here: the peak of the device in use, in the dtype it would train in."""
    from headway.account.measured_peaks import MeasuredPeaks
    from headway.account.peaks import resolve_peak
    from headway.guard.doctor import Finding
    from headway.parallel.device import choose_device

    device = choose_device("auto")
    dtype = "bf16" if device.type == "cuda" else "fp32"
    measured, problem = MeasuredPeaks.usable()
    peak = resolve_peak(device.name, dtype, threads=device.threads or None, measured=measured)
    if problem:
        return Finding("peak", "note", f"{problem}; {peak.line()}")
    return Finding("peak", "good" if peak.flops else "note", peak.line())


def register(app: typer.Typer) -> None:
    app.command()(doctor)
