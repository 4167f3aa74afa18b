"""`headway bench …`: measure the machine and the parts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.cli import bench_diagnose
from headway.cli.output import print_json
from headway.cli.paths import out_path
from headway.cli.scratch import scratch_folder

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the machine (peak, comm), its parts (data, packing, kernels), speed, and what breaks (faults).",
)

bench_diagnose.register(app)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def peak(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16, fp16, tf32; default fp32 and bf16.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: as training uses).", min=1)] = None,
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
def comm(
    ranks: Annotated[
        int | None, typer.Option(help="Processes to start here (default: this machine's GPUs, else 2).", min=1)
    ] = None,
    ops: Annotated[str, typer.Option(help="Collectives, comma separated (default: all four).")] = "",
    sizes: Annotated[str, typer.Option(help="Bytes, e.g. 4K,1M,256M (default: 4K to 16M on CPUs, 1G on GPUs).")] = "",
    seconds: Annotated[float, typer.Option(help="Seconds for each collective, size and group.")] = 0.3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(parser=out_path, help="Write the JSON here, for headway plan calibrate.")
    ] = None,
    json: Json = False,
) -> int:
    """Measure all-reduce, all-gather, reduce-scatter and all-to-all by size, with gloo on a CPU and NCCL on GPUs.

    Over several nodes start it as training is started (torchrun sets the ranks); the links inside a node and the
    network are told apart. Exit code 3 when the backend lacks a collective.

    Example: headway bench comm --out comm.json && headway plan calibrate comm.json --cluster H100x8 --out mine.yaml
    """
    from headway.bench.comm import OPS, CommOptions, bench_comm, parse_sizes, write

    options = CommOptions(_names(ops) or OPS, parse_sizes(sizes), seconds, device)
    report = bench_comm(ranks, options)
    if report is None:  # a launcher's other ranks
        return 0
    if out is not None:
        write(report, out)
    print_json(report.record()) if json else print("\n".join([*report.lines(), *([f"written: {out}"] if out else [])]))
    return 3 if report.missing else 0


@app.command()
def data(
    sources: Annotated[list[Path], typer.Argument(help="Chats or text to prepare.")],
    tokenizer: Annotated[str, typer.Option(help="Tokenizer folder.")],
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
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
    documents: Annotated[int, typer.Option(help="Documents to pack.", min=1)] = 1_000_000,
    capacity: Annotated[int, typer.Option(help="Slots of a pack.", min=1)] = 8192,
    rounds: Annotated[int, typer.Option(help="Runs of Headway's packer.", min=1)] = 5,
    json: Json = False,
) -> None:
    """Time packing of chat-like lengths, against TRL's packer where it is installed.

    Example: headway bench packing --documents 1000000
    """
    from headway.bench.packing import compare

    lines = compare(documents, capacity, rounds, peer_repeats=1)
    print_json({"lines": lines}) if json else print("\n".join(lines))


@app.command()
def checkpoint(
    gigabytes: Annotated[float, typer.Option(help="Size of the training state.")] = 2.4,
    rounds: Annotated[int, typer.Option(help="Saves measured in each tier.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads that train.", min=1)] = 1,
    corruptions: Annotated[int, typer.Option(help="Injected corruptions.")] = 1000,
    folder: Annotated[Path | None, typer.Option(help="Where to save (default: the temporary folder).")] = None,
    minutes: Annotated[
        bool, typer.Option("--minutes", help="Instead: a save a minute against none, whole minutes in turn, 4 a round.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure what saves cost a training, whether damage is ever accepted, and whether memory grows.

    Example: headway bench checkpoint --gigabytes 2.4 --rounds 5
    """
    from headway.bench.checkpoint import bench_damage, bench_growth, bench_saves

    if minutes:
        from headway.bench.checkpoint_minute import bench_minute

        whole = bench_minute(gigabytes, rounds, threads, folder=folder)
        print_json(asdict(whole)) if json else print("\n".join(whole.lines()))
        return

    growth, damage = bench_growth(), bench_damage(corruptions)
    saves = bench_saves(gigabytes, rounds, threads, folder)
    if json:
        print_json({"growth": asdict(growth), "damage": asdict(damage), "saves": asdict(saves)})
    else:
        print("\n".join([*growth.lines(), *damage.lines(), *saves.lines()]))


@app.command()
def kernels(
    run_file: Annotated[Path, typer.Argument(help="Run file: model, data, slots, precision.", metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …", metavar="[KEY=VALUE …]")] = None,
    seconds: Annotated[float, typer.Option(help="Time for measuring, all operations together.")] = 180.0,
    json: Json = False,
) -> int:
    """Check and time every kernel that `model.fuse: auto` chooses from, on this run's shapes; keep the choices.

    Exit code 1 when a candidate computed something wrong (it is never used).

    Example: headway bench kernels run.yaml data.slots=16384
    """
    from headway.bench.kernels import bench_kernels, lines
    from headway.config.load import load_run
    from headway.train.fusing import as_record

    chosen = bench_kernels(load_run(run_file, overrides or []).config, seconds, lambda text: None)
    print_json(as_record(chosen)) if json else print("\n".join(lines(chosen)))
    return 1 if any(result.wrong for choice in (*chosen.choices, *chosen.update) for result in choice.results) else 0


@app.command()
def speed(
    run_file: Annotated[
        Path, typer.Argument(help="Run file: model, data, seq_len, learning rate.", metavar="RUN.yaml")
    ],
    peers: Annotated[str, typer.Option(help="Other trainers to run beside Headway: hf, trl (comma separated).")] = "",
    peer_python: Annotated[
        str | None, typer.Option(help="Interpreter that has the peers installed (default: this one).")
    ] = None,
    presets: Annotated[str, typer.Option(help="Headway's contestants; the last is held against all.")] = "naive,fast",
    documents: Annotated[int, typer.Option(help="Documents a round, the same for all.", min=2)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds that count.", min=1)] = 3,
    warm_up: Annotated[bool, typer.Option(help="One round before them that does not count.")] = True,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each contestant (default: torch's).", min=1)
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="A new process each round, where memory does not hold all at once.")
    ] = False,
    one_by_one: Annotated[
        bool | None,
        typer.Option(
            "--one-by-one/--in-turn", help="All rounds of a contestant before the next one (default: on a GPU)."
        ),
    ] = None,
    scratch: Annotated[Path | None, typer.Option(help="Folder to keep what is written (default: removed).")] = None,
    json: Json = False,
) -> int:
    """Run Headway's presets and other trainers side by side on the same documents; print ratios and waterfalls.

    Exit code 1 when a contestant of Headway's own computes something else than one document at a time would.

    Example: headway bench speed run.yaml --peers hf,trl --peer-python peers/bin/python
    """
    import sys

    from headway.bench.speed import SpeedOptions, bench_speed
    from headway.bench.speed_table import lines, record

    options = SpeedOptions(
        presets=_names(presets),
        peers=_names(peers),
        peer_python=peer_python,
        documents=documents,
        rounds=rounds,
        warm_up=warm_up,
        threads=threads,
        resident=not restart,
        one_by_one=one_by_one,
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    with scratch_folder("speed") as temporary:
        result = bench_speed(run_file, options, scratch or temporary, say)
        if json:
            print_json(record(result))
        else:
            print("\n" + "\n".join(lines(result)))
    return 1 if any(each.wrong for each in result.contestants if each.name in options.presets) else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@app.command()
def faults(
    campaign: Annotated[Path | None, typer.Option(help="A campaign (JSON); default: the whole catalogue.")] = None,
    rows: Annotated[str, typer.Option(help="Only these rows, e.g. 1,5,34.")] = "",
    repeat: Annotated[int, typer.Option(help="Runs of each row, each with its own seed.", min=1)] = 1,
    kills: Annotated[
        int, typer.Option(help="Instead of the rows: so many kill -9 at random moments of one training.", min=0)
    ] = 0,
    scratch: Annotated[Path | None, typer.Option(help="Folder to keep what the runs leave (default: removed).")] = None,
    json: Json = False,
) -> int:
    """Inject every fault of the catalogue into a small training and check the outcome; print the table of times.

    Exit code 1 when an outcome is wrong, 3 when rows were skipped for want of a privilege.

    Example: headway bench faults --rows 1,5 --repeat 10
    """
    from headway.account.errors import UserError
    from headway.bench.faults.campaign import HEADER, MANIFEST, line, read_manifest, run_campaign, run_storm

    if kills:
        storm = run_storm(kills, scratch)
        print_json(storm.record()) if json else print("\n".join(storm.lines()))
        return 0 if storm.right else 1

    wanted = [text for text in rows.split(",") if text.strip()]
    if not all(text.strip().isdigit() for text in wanted):
        raise UserError(f"--rows {rows}: give numbers, e.g. --rows 1,5,34")
    numbers = {int(text) for text in wanted}
    entries = [entry for entry in read_manifest(campaign or MANIFEST) if not numbers or entry.row in numbers]
    missing = numbers - {entry.row for entry in entries}
    if missing:
        raise UserError(f"--rows: no row {', '.join(map(str, sorted(missing)))} in the campaign")
    if not json:
        print(HEADER, flush=True)
    results = run_campaign(entries, repeat, scratch, None if json else lambda result: print(line(result), flush=True))
    if json:
        print_json([asdict(result) for result in results])
    outcomes = {result.outcome for result in results}
    return 1 if "wrong" in outcomes else 3 if "skipped" in outcomes else 0


@app.command()
def spikes(
    run_file: Annotated[Path | None, typer.Argument(help="Run file of a small training.", metavar="RUN.yaml")] = None,
    steps: Annotated[int, typer.Option(help="Steps trained before documents are poisoned.", min=1)] = 60,
    injections: Annotated[int, typer.Option(help="Documents poisoned, one a batch.")] = 100,
    clean: Annotated[int, typer.Option(help="Clean generated steps of each kind of noise.")] = 20_000,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Score the guard: false alarms on generated courses, and poisoned documents seen and named in a real training.

    Example: headway bench spikes run.yaml --injections 100 --clean 200000
    """
    from headway.bench.spikes import inject, stream_lines
    from headway.config.load import load_run

    lines = stream_lines(clean, seed) if clean else []
    if run_file is not None:
        with scratch_folder("spikes") as scratch:
            lines += inject(load_run(run_file, []).config, scratch, steps, injections, seed).lines()
    print_json({"lines": lines}) if json else print("\n".join(lines))
