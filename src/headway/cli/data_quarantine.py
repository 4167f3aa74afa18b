"""`headway data quarantine list|release RUN_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.output import print_json

app = typer.Typer(no_args_is_help=True, help="Documents that a run set aside: look at them, bring them back.")

RunDir = Annotated[Path, typer.Argument(help="A run folder, e.g. runs/NAME.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_documents(run_dir: RunDir, json: Json = False) -> int:
    """List the documents that a run set aside: where they came from, why, and how they begin.

    A document keeps its number, whichever others are released. Exit code 0, also when there is none.

    Example: headway data quarantine list runs/demo
    """
    lines = _standing(_numbered(run_dir))
    if json:
        print_json([_record(number, line) for number, line in lines.items()])
        return 0
    if not lines:
        print(f"no document of {run_dir} is set aside")
    for number, line in lines.items():
        loss = f", loss {line.loss:.3f}" if line.loss is not None else ""
        print(f"{number:>4}  {line.source}:{line.line}  step {line.step}, epoch {line.epoch}{loss}")
        print(f"      {line.reason}")
        if line.excerpt:
            print(f"      {_printable(line.excerpt)}")
    return 0


@app.command()
def release(
    run_dir: RunDir,
    numbers: Annotated[list[int] | None, typer.Argument(help="Numbers that `list` shows.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Every one of them.")] = False,
    json: Json = False,
) -> None:
    """Bring documents back. A run heeds it when it starts the next time, from its next epoch on.

    Example: headway data quarantine release runs/demo 1 3
    """
    from headway.account.errors import UserError
    from headway.guard.quarantine import release as give_back
    from headway.record.folder import RunFolder

    known = _numbered(run_dir)
    held = _standing(known)
    wanted = list(held) if all else sorted(set(numbers or []))
    if not wanted and not all:
        raise UserError("name the documents by the numbers that `headway data quarantine list` shows, or give --all")
    unknown = [number for number in wanted if number not in known]
    if unknown:
        raise UserError(f"{run_dir}: no document has the number {unknown[0]}; {_which(held)}")
    chosen = {number: held[number] for number in wanted if number in held}
    give_back(RunFolder.open(run_dir).quarantine, chosen.values())
    if json:
        print_json([_record(number, line) for number, line in chosen.items()])
        return
    for number in wanted:
        before = "released" if number in chosen else "released before:"
        print(f"{before} {known[number].source}:{known[number].line}")
    if chosen:
        print("the run takes them up again in its first whole epoch after its next start")
    elif not wanted:
        print(f"no document of {run_dir} is set aside")


def _numbered(run_dir: Path) -> dict[int, Any]:
    """Every document that the ledger knows, released or not; says on stderr what of it cannot be read."""
    from headway.guard.quarantine import numbered, read_lines
    from headway.record.folder import RunFolder

    path = RunFolder.open(run_dir).quarantine
    lines = read_lines(path)
    for number, why in lines.bad:
        print(f"headway: {path}:{number}: cannot be read, its document is not listed: {why}", file=sys.stderr)
    return numbered(lines.items)


def _standing(known: dict[int, Any]) -> dict[int, Any]:
    from headway.guard.quarantine import RELEASED

    return {number: line for number, line in known.items() if line.reason != RELEASED}


def _which(held: dict[int, Any]) -> str:
    return f"set aside are {', '.join(map(str, held))}" if held else "none is set aside"


def _record(number: int, line: Any) -> dict[str, Any]:
    import msgspec

    # The line has a `number` too, that of its data source: joined the other way round, no JSON named what to release.
    return {**msgspec.structs.asdict(line), "source_number": line.number, "number": number}


def _printable(text: str) -> str:
    """On one line, and nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "␤" if letter == "\n" else "·" for letter in text)
