"""`headway bench …`: measure the machine and the parts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import print_json

app = typer.Typer(no_args_is_help=True, help="Measure the machine (peak) and the parts (data, packing).")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def peak(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16, fp16, tf32; default fp32 and bf16.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: as training uses).")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each dtype.")] = 4.0,
    json: Json = False,
) -> None:
    """Measure this machine's peak matmul rate and keep it, so that MFU has a base.

    Example: headway bench peak --dtype bf16
    """
    from headway.bench.peak import bench_peak
    from headway.parallel.device import choose_device

    chosen = choose_device(device).type
    found = [bench_peak(chosen, one, threads, seconds) for one in dtype or ["fp32", "bf16"]]
    if json:
        print_json([asdict(saved.kept) for saved in found])
        return
    for saved in found:
        print("\n".join(saved.lines()))


@app.command()
def data(
    sources: Annotated[list[Path], typer.Argument(help="Chats or text to prepare.")],
    tokenizer: Annotated[str, typer.Option(help="Tokenizer folder.")],
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 5,
    json: Json = False,
) -> None:
    """Time `data prepare` against the tokenizer alone on the same text and cores; print the ratio.

    Example: headway bench data chats.jsonl --tokenizer model/
    """
    from headway.bench.data import bench_prepare

    report = bench_prepare([str(source) for source in sources], tokenizer, rounds=rounds)
    print_json(asdict(report)) if json else print("\n".join(report.lines()))


@app.command()
def packing(
    documents: Annotated[int, typer.Option(help="Documents to pack.")] = 1_000_000,
    capacity: Annotated[int, typer.Option(help="Slots of a pack.")] = 8192,
    rounds: Annotated[int, typer.Option(help="Runs of Headway's packer.")] = 5,
    json: Json = False,
) -> None:
    """Time packing of chat-like lengths, against TRL's packer where it is installed.

    Example: headway bench packing --documents 1000000
    """
    from headway.bench.packing import compare

    lines = compare(documents, capacity, rounds, peer_repeats=1)
    print_json({"lines": lines}) if json else print("\n".join(lines))
