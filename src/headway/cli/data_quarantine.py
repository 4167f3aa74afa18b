"""`headway data quarantine list|release RUN_DIR`."""

from __future__ import annotations

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

    Exit code 0, also when there is none.

    Example: headway data quarantine list runs/demo
    """
    lines = _standing(run_dir)
    if json:
        print_json([_record(number, line) for number, line in enumerate(lines, 1)])
        return 0
    if not lines:
        print(f"no document of {run_dir} is set aside")
    for number, line in enumerate(lines, 1):
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

    lines = _standing(run_dir)
    wanted = list(range(1, len(lines) + 1)) if all else sorted(set(numbers or []))
    if not wanted:
        raise UserError("name the documents by the numbers that `headway data quarantine list` shows, or give --all")
    unknown = [number for number in wanted if not 1 <= number <= len(lines)]
    if unknown:
        raise UserError(f"{run_dir}: there is no document {unknown[0]} in quarantine, only {len(lines)}")
    chosen = [lines[number - 1] for number in wanted]
    give_back(RunFolder.open(run_dir).quarantine, chosen)
    if json:
        print_json([_record(number, line) for number, line in zip(wanted, chosen, strict=True)])
        return
    for line in chosen:
        print(f"released {line.source}:{line.line}")
    print("the run takes them up again in its first whole epoch after its next start")


def _standing(run_dir: Path) -> list[Any]:
    from headway.guard.quarantine import read_ledger, standing
    from headway.record.folder import RunFolder

    return standing(read_ledger(RunFolder.open(run_dir).quarantine))


def _record(number: int, line: Any) -> dict[str, Any]:
    import msgspec

    return {"number": number, **msgspec.structs.asdict(line)}


def _printable(text: str) -> str:
    """On one line, and nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "␤" if letter == "\n" else "·" for letter in text)
