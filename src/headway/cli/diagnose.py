"""`headway diagnose TRACE… | RUN_DIR`: where the seconds went, and what to do first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import print_json
from headway.cli.paths import is_no_input, out_path

# Tokens in a trace (a device whose memory held nothing but bytes has fewer) and in a document (its pairs are counted
# in 64 bits).
_MOST, _LONGEST = 10**12, 10**9


def diagnose(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Profiler traces (.json, .json.gz), one a rank; or a run folder.", metavar="TRACE…|RUN_DIR"
        ),
    ],
    against: Annotated[Path | None, typer.Option(help="A trace or run folder to compare with.")] = None,
    memory: Annotated[Path | None, typer.Option(help="A PyTorch memory snapshot (.pickle).")] = None,
    tokens: Annotated[int | None, typer.Option(help="Real tokens of one rank in the window; tells padding.")] = None,
    slots: Annotated[
        int | None, typer.Option(help="Slots computed in the window, where the trace does not say.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The model's config.json; with --tokens, tells MFU.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Typical document length, for the model's attention.")] = None,
    device: Annotated[str | None, typer.Option(help="The device's exact name, where the trace lacks it.")] = None,
    window: Annotated[str, typer.Option(help="auto, steps or gpu (first to last GPU event).")] = "auto",
    comm_kernel: Annotated[list[str] | None, typer.Option(help="REGEX of further communication kernels.")] = None,
    html: Annotated[Path | None, typer.Option(parser=out_path, help="Also write one self-contained page here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say where each second went, how sure that is, and what to change first. Exit code 3 where part could not be read.

    Example: headway diagnose traces/*.json.gz
    """
    from headway.account.errors import UserError
    from headway.diagnose.compare import compare
    from headway.diagnose.job import Options
    from headway.diagnose.open import open_diagnosis
    from headway.diagnose.said import Said
    from headway.watch.console import make_console
    from headway.watch.diagnosis_text import render_comparison, render_diagnosis

    for name, value in (("--tokens", tokens), ("--slots", slots), ("--seq-len", seq_len)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: give a number of 1 or more")
        if value is not None and value > (_LONGEST if name == "--seq-len" else _MOST):
            raise UserError(f"{name} {value}: no trace holds so many; give what one rank computes in the window")
    if slots is not None and tokens is None:
        raise UserError("--slots is used with --tokens; give both")
    if seq_len is not None and model is None:
        raise UserError("--seq-len is used with --model; give both")
    is_no_input("--html", html, (*inputs, against, memory, model))
    options = Options(window=window, comm_kernels=tuple(comm_kernel or ()))
    mine = open_diagnosis(inputs, options, Said(tokens, slots, memory, model, seq_len, device))
    other = open_diagnosis([against], options, Said(device=device)) if against is not None else None
    compared = compare(mine, other) if other is not None else None
    code = 3 if mine.partial or (other is not None and other.partial) else 0
    if html is not None:
        from headway.watch.diagnosis_page import write_page

        try:
            write_page(html, mine, compared)
        except OSError as error:
            raise UserError(f"--html {html}: {error.strerror or error}") from None
    if json:
        print_json({**mine.to_dict(), **({"against": compared.to_dict()} if compared else {})})
        return code
    console = make_console()
    console.print(render_diagnosis(mine))
    if compared is not None:
        console.print(render_comparison(compared))
    return code


def register(app: typer.Typer) -> None:
    app.command()(diagnose)
