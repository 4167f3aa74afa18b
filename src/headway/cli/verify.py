"""`headway verify A.yaml B.yaml`: are two configurations the same training?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import print_json
from headway.cli.paths import is_no_input, out_path
from headway.cli.scratch import scratch_folder


def verify(
    a: Annotated[Path, typer.Argument(help="The run file that counts as right.", metavar="A.yaml")],
    b: Annotated[
        Path | None, typer.Argument(help="The other run file; without it, A's own.", metavar="[B.yaml]")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--change", "-c", help="key=value laid over B; may be repeated.")
    ] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Hold B against its own obvious path: float32, nothing fused.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each side.", min=1)] = 10,
    held_out: Annotated[int, typer.Option(help="Steps' worth of documents for the loss at the end.", min=1)] = 2,
    seed: Annotated[bool, typer.Option("--seed", help="Also train A with another seed, to show that spread.")] = False,
    html: Annotated[
        Path | None, typer.Option(parser=out_path, help="Write the plots as one self-contained page.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> int:
    """Train two configurations on the same documents from the same weights; exit code 1 when they disagree, 3 when they
    agree but a step of one is larger.

    Example: headway verify run.yaml --change preset=fast --html verify.html
    """
    from headway.account.errors import UserError
    from headway.config.load import load_run
    from headway.prove.page import page
    from headway.prove.report import lines, record
    from headway.prove.verify import reference_of
    from headway.prove.verify import verify as run_verify

    if b is None and not change and not reference:
        raise UserError("verify: nothing to compare: give a second run file, --change key=value, or --reference")
    is_no_input("--html", html, (a, b))
    second = load_run(b or a, change or []).config
    first = reference_of(second) if reference else load_run(a).config
    show = sys.stderr.isatty()

    def say(text: str) -> None:
        if show:
            print(f"\r{text[:100]}\033[K", end="", file=sys.stderr, flush=True)

    with scratch_folder("verify") as scratch:
        found = run_verify(first, second, scratch, steps=steps, held_out=held_out, say=say, seed_band=seed)
    if show:
        print(file=sys.stderr)
    if html is not None:
        name = f"{b or a}" + (f" with {', '.join(change)}" if change else "")
        html.write_text(page(found, f"{a}, obvious path" if reference else str(a), name), encoding="utf-8")
    if json:
        print_json(record(found))
    else:
        print("\n".join(lines(found)))
    return found.exit_code


def register(app: typer.Typer) -> None:
    app.command()(verify)
