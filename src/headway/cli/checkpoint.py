"""`headway checkpoint list|verify|export|prune|advise RUN_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.output import print_json

app = typer.Typer(no_args_is_help=True, help="Look at, verify, export and prune a run's checkpoints.")

RunDir = Annotated[Path, typer.Argument(help="A run folder, e.g. runs/NAME.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_checkpoints(run_dir: RunDir, json: Json = False) -> None:
    """List checkpoints in memory, on the disk and in the store, with their sizes by part.

    Example: headway checkpoint list runs/demo
    """
    from headway.train.look import places_of

    places, problems = places_of(run_dir)
    rows = [_row(info, tier) for tier, infos in places.items() for info in infos]
    if json:
        print_json(rows)
    else:
        _print_table(rows, f"no checkpoint in {run_dir}")
    for problem in problems:
        print(f"headway: {problem}", file=sys.stderr)


@app.command()
def verify(run_dir: RunDir, json: Json = False) -> int:
    """Read every byte of every checkpoint and compare it with its manifest. Exit code 1 when one is damaged.

    Example: headway checkpoint verify runs/demo
    """
    from headway.guard.infos import infos
    from headway.record.folder import RunFolder

    folder = RunFolder.open(run_dir, for_checkpoints=True)
    rows = [_row(info) for info in infos(folder.checkpoints, verify=True)]
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


@app.command()
def prune(
    run_dir: RunDir,
    keep: Annotated[int, typer.Option(help="Newest checkpoints that stay.", min=1)] = 2,
    keep_every: Annotated[int | None, typer.Option(help="Steps that this divides stay, too.", min=1)] = None,
    json: Json = False,
) -> int:
    """Delete a run's older checkpoints on the disk. Exit code 1 when one that should have gone stays.

    Only those that verify are counted, so never the newest of them; and nothing goes that is damaged, in use, another
    run's, or holds foreign files.

    Example: headway checkpoint prune runs/demo --keep 3 --keep-every 1000
    """
    from headway.train.places import own_store

    done = own_store(run_dir).prune(keep, keep_every)
    if json:
        print_json({"removed": done.removed, "left": done.left})
    else:
        print(f"removed {', '.join(done.removed) or 'nothing'}")
        for left in done.left:
            print(f"left {left}")
    return 1 if done.left else 0


@app.command()
def advise(run_dir: RunDir, json: Json = False) -> None:
    """Say how often to save in each tier, by what this run's saves cost and how often it failed.

    Example: headway checkpoint advise runs/demo
    """
    from headway.record.folder import RunFolder
    from headway.train.cadence import advise_run

    advice = advise_run(RunFolder.open(run_dir))
    if json:
        rate = advice.rate
        band = {"mean": rate.mean, "low": rate.low, "high": rate.high, "basis": rate.basis}
        print_json({"steps": advice.steps, "ettr": advice.goodput.ettr, "failures_per_gpu_day": band})
    else:
        print("\n".join(advice.lines()))


def _row(info: Any, tier: str = "disk") -> dict[str, Any]:
    return {
        "tier": tier,
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
    left = ("tier", "checkpoint", "created (UTC)", "state")
    for name in ("tier", "checkpoint", "total", "model", "optimizer", "rest", "ranks", "created (UTC)", "state"):
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        sizes = [fmt.size(row.get(key)) for key in ("bytes", "model_bytes", "optimizer_bytes", "rest_bytes")]
        table.add_row(row["tier"], row["checkpoint"], *sizes, str(row["ranks"]), row["created"], row["state"])
    make_console(width=None if sys.stdout.isatty() else 140).print(table)
    for row in rows:
        for problem in row["problems"]:
            print(f"{row['checkpoint']}: {problem}")
