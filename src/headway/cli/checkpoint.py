"""`headway checkpoint list|verify|export RUN_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.output import print_json

app = typer.Typer(no_args_is_help=True, help="Look at, verify and export a run's checkpoints.")

RunDir = Annotated[Path, typer.Argument(help="A run folder, e.g. runs/NAME.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_checkpoints(run_dir: RunDir, json: Json = False) -> None:
    """List checkpoints with their sizes by part.

    Example: headway checkpoint list runs/demo
    """
    rows = [_row(info) for info in _store(run_dir).list()]
    if json:
        print_json(rows)
        return
    _print_table(rows, f"no checkpoint in {run_dir}")


@app.command()
def verify(run_dir: RunDir, json: Json = False) -> int:
    """Read every byte of every checkpoint and compare it with its manifest. Exit code 1 when one is damaged.

    Example: headway checkpoint verify runs/demo
    """
    rows = [_row(info) for info in _store(run_dir).list(verify=True)]
    if json:
        print_json(rows)
    else:
        _print_table(rows, f"no checkpoint in {run_dir}")
    return 1 if any(row["problems"] for row in rows) else 0


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(help="Folder for the model; it must not exist.")],
    step: Annotated[int | None, typer.Option(help="Step to export (default: the newest verified).")] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint as a folder that Hugging Face tools load: safetensors, config, tokenizer.

    Example: headway checkpoint export runs/demo exported/
    """
    from headway.train.export import export_checkpoint

    ref = export_checkpoint(run_dir, out, step)
    if json:
        print_json({"checkpoint": ref.name, "out": str(out), "rejected": list(ref.rejected)})
    else:
        for reason in ref.rejected:
            print(f"newer checkpoint not used: {reason}")
        print(f"exported {ref.name} to {out}")


def _store(run_dir: Path) -> Any:
    from headway.guard.checkpoint import CheckpointStore
    from headway.record.folder import RunFolder

    return CheckpointStore(RunFolder.open(run_dir).checkpoints, None)


def _row(info: Any) -> dict[str, Any]:
    return {
        "checkpoint": info.ref.name,
        "step": info.ref.step,
        "bytes": sum(info.parts.values()),
        **{f"{part}_bytes": size for part, size in info.parts.items()},
        "created": info.created,
        "ranks": info.world_size,
        "state": {True: "verified", False: "damaged", None: "sizes agree"}[info.verified],
        "problems": list(info.problems),
    }


def _print_table(rows: list[dict[str, Any]], empty: str) -> None:
    from rich.table import Table

    from headway.watch import format as fmt
    from headway.watch.console import make_console

    if not rows:
        print(empty)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "total", "model", "optimizer", "rest", "ranks", "created (UTC)", "state"):
        table.add_column(name, justify="right" if name not in ("checkpoint", "created (UTC)", "state") else "left")
    for row in rows:
        sizes = [fmt.size(row.get(key)) for key in ("bytes", "model_bytes", "optimizer_bytes", "rest_bytes")]
        table.add_row(row["checkpoint"], *sizes, str(row["ranks"]), row["created"], row["state"])
    make_console(width=None if sys.stdout.isatty() else 140).print(table)
    for row in rows:
        for problem in row["problems"]:
            print(f"{row['checkpoint']}: {problem}")
