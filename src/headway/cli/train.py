"""`headway train RUN.yaml [key=value …]`: one run, end to end. Here the rooms are wired together."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.starting import leave, start_is_over

if TYPE_CHECKING:
    from headway.account.events import Observer
    from headway.config.run import RunConfig
    from headway.guard.hosts import HostList
    from headway.guard.nodes.meeting import Meeting
    from headway.guard.ranks import RankEnv
    from headway.train.hook import HookPlace, StepHook
    from headway.watch.alerts import Alerts

# A stray bad batch may be the last one of a good run.
_STUCK = 3
_COMMAND = "HEADWAY_COMMAND"
_REASON_CODES = {"done": 0, "preempted": 75}


def train(
    run_file: Annotated[Path, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. data.seq_len=4096.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print every setting and its origin; do nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary (or the settings) as JSON.")] = False,
) -> int:
    """Train a model as the run file says; resume where the run folder's newest checkpoint ends.

    Example: headway train run.yaml data.seq_len=4096 parallel.fsdp=2
    """
    from headway.config.load import load_run

    loaded = load_run(run_file, overrides or [])
    if show:
        return _show(loaded, json)
    from headway.guard.ranks import read_rank_env

    config = loaded.config
    rank_env = read_rank_env(os.environ)
    if rank_env is None:
        ranks = ranks_to_start(config)
        if ranks > 1:
            return launch_supervised(config, ranks, sys.argv[1:])
    from headway.watch.console import outliving_readers

    with outliving_readers():
        return _train_here(config, rank_env, json)


def _show(loaded: object, json: bool) -> int:
    from headway.cli.output import print_json
    from headway.config.show import show_records, show_text

    if json:
        print_json(show_records(loaded))  # type: ignore[arg-type]
    else:
        print(show_text(loaded))  # type: ignore[arg-type]
    return 0


def ranks_to_start(config: RunConfig) -> int:
    """How many ranks the run file asks for on this machine."""
    import torch

    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    return config.parallel.local_ranks(gpus)


def launch_supervised(
    config: RunConfig,
    ranks: int,
    argv: Sequence[str],
    hang_s: float = 5.0,
    min_ranks: int | None = None,
    hosts: HostList | None = None,
    meeting: Meeting | None = None,
) -> int:
    """Starts a command once per rank, under supervision. Data is prepared first, so that no rank waits in a
    collective for it. `meeting`: with the supervisors of other machines."""
    from headway.account.run_clock import LAUNCHED_AT, process_age_ns
    from headway.guard.hosts import HostList
    from headway.guard.ledger import Ledger
    from headway.guard.processes import Start, can_fork, in_child
    from headway.guard.ranks import PREPARED_VARIABLE
    from headway.guard.supervisor import Supervisor
    from headway.record.folder import RunFolder

    launched_at = time.time() - process_age_ns() / 1e9
    entry = _entry if _may_fork(config) else None
    if entry is not None and can_fork():
        code = in_child(lambda: _prepared(config))  # the threads that it starts would forbid a fork of the ranks
        if code == -signal.SIGTERM:
            leave()
        if code:
            return 128 - code if code < 0 else code
    else:
        _prepare(config)
    folder = RunFolder(config.folder).create()
    code = Supervisor(
        start=Start(argv, entry=entry),
        ranks=ranks,
        ledger=Ledger(folder.incidents, listeners=_alerts(config)),
        logs=folder.logs,
        env={**os.environ, LAUNCHED_AT: repr(launched_at), PREPARED_VARIABLE: "1", _COMMAND: _typed()},
        hang_least_s=hang_s,
        places=_places(config, ranks),
        hosts=hosts or HostList(folder.root / "hosts.json"),
        min_ranks=min_ranks,
        fits=config.parallel.fits,
        rank_files=folder.rank,
        slow=config.health.slow_rank,
        sharded=(meeting is None or config.parallel.fits(ranks)) and config.parallel.dims(ranks)[1] > 1,
        meeting=meeting,
    ).run()
    start_is_over()
    return code


def _places(config: RunConfig, ranks: int) -> list[str]:
    """A GPU can be taken out by itself; a CPU is its host."""
    import torch

    from headway.guard.cards import card_places

    host = socket.gethostname()
    on_gpu = config.device != "cpu" and torch.cuda.device_count() > 0
    return card_places(host, ranks, os.environ) if on_gpu else [host] * ranks


def _may_fork(config: RunConfig) -> bool:
    """On a CPU the ranks are forked from this process, which then loads what they need, once; a device must not have
    been touched by the process that forks."""
    import torch

    if config.device == "cuda" or torch.cuda.is_available():
        return False
    from headway.train.preload import preload

    preload(config)
    torch.set_num_threads(1)
    return True


def _prepare(config: RunConfig) -> None:
    from headway.cli.progress import progress
    from headway.train.data import prepare_sources
    from headway.train.model import check_model_section

    check_model_section(config)
    prepare_sources(config, say=_say, progress=progress())


def _prepared(config: RunConfig) -> int:
    from headway.account.errors import UserError

    try:
        _prepare(config)
    except UserError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 2
    return 0


def _entry(argv: Sequence[str]) -> None:
    from headway.cli.main import main

    main(list(argv))


def _train_here(config: RunConfig, rank_env: RankEnv | None, json: bool) -> int:
    from headway.account.run_clock import start_run_clock
    from headway.cli.progress import progress
    from headway.guard.beacon import light_beacon
    from headway.guard.failure import record_failure
    from headway.guard.process_group import close_process_group
    from headway.train.build import build_run
    from headway.train.loop import train as run_loop

    run_clock = start_run_clock()
    beacon = light_beacon(os.environ, rank_env.rank) if rank_env is not None else None
    run_clock.watch = beacon
    main = rank_env is None or rank_env.rank == 0
    if rank_env is not None and rank_env.world_size > 1:
        start_is_over()  # a handler of Python's would wait as long as a collective for ranks that have gone
    try:
        run = build_run(
            config,
            rank_env,
            run_clock,
            observers=(lambda: _observers(config, quiet=json)) if main else list,
            say=_say if main and not json else _say_nothing,
            progress=progress() if main and not json else None,
            hook=lambda place: _periodic_trace(config, place),
            beacon=beacon,
            listeners=_alerts(config),
        )
        start_is_over()  # the run answers by itself now
        reason = run_loop(run)
    except BaseException as error:
        # First of all, or the launcher would name a rank that only fell with this one.
        record_failure(error)
        kept = _keep_for_the_log(config, rank_env, error)
        _leave_process_group(error, kept)
        if kept:
            return 1
        raise
    code = _REASON_CODES[reason]
    if main:
        stuck = _tell_end(config, reason, json)
        # One of several ranks that says "bad news" would be a failure to whoever started them.
        code = code or int(stuck and rank_env is None)
    if not close_process_group():
        _exit_at_once(code)
    return code


def _alerts(config: RunConfig) -> list[Alerts]:
    from headway.watch.alerts import Alerts

    return [Alerts(config.alerts, config.name)] if config.alerts.to else []


def _periodic_trace(config: RunConfig, place: HookPlace) -> StepHook | None:
    from headway.diagnose.periodic import PeriodicTrace

    every = config.log.profile_every
    return PeriodicTrace(place, every, config.log.profile_steps) if every is not None else None


_PEER = re.compile(r"gloo/|Connection (closed|reset) by peer|NCCL|Broken pipe")


def _keep_for_the_log(config: RunConfig, rank_env: RankEnv | None, error: BaseException) -> bool:
    """A collective that failed because another rank went: on rank 0, whose output is the terminal's, a line there and
    the traceback in a log; the supervisor says what happened. False where it is anything else."""
    from headway.guard.ranks import LAUNCHER_VARIABLE
    from headway.record.folder import RunFolder

    supervised = rank_env is not None and rank_env.rank == 0 and LAUNCHER_VARIABLE in os.environ
    if not supervised or not isinstance(error, RuntimeError) or not _PEER.search(str(error)) or "--debug" in sys.argv:
        return False
    log = RunFolder(config.folder).logs / "rank-00000.log"
    try:
        with log.open("a", encoding="utf-8") as stream:
            traceback.print_exception(error, file=stream)
    except OSError:
        return False
    first = str(error).partition("\n")[0]
    print(f"headway: rank 0: a collective failed: {first[:200]} (more in {log})", file=sys.stderr, flush=True)
    return True


def _leave_process_group(error: BaseException, kept: bool) -> None:
    """Before an error leaves: an ordinary exit would wait for ever for a collective whose other ranks are gone. `kept`:
    the error is told already."""
    from headway.account.errors import UserError
    from headway.guard.process_group import close_process_group

    if close_process_group():
        return
    if isinstance(error, UserError):
        print(f"headway: {error}", file=sys.stderr)
        _exit_at_once(error.exit_code)
    if not kept:
        traceback.print_exception(error)
    _exit_at_once(1)


def _exit_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _observers(config: RunConfig, quiet: bool) -> list[Observer]:
    from headway.record.folder import RunFolder
    from headway.watch.live import LiveLine
    from headway.watch.metrics_sink import MetricsSink
    from headway.watch.tensorboard_sink import TensorboardSink

    folder = RunFolder(config.folder)
    observers: list[Observer] = [MetricsSink(folder)]
    if not quiet:
        observers.append(LiveLine(config.log.every, config.log.quiet))
    if config.log.tensorboard:
        observers.append(TensorboardSink(folder.tensorboard))
    return observers


def _tell_end(config: RunConfig, reason: str, json: bool) -> bool:
    """Writes the report and shows the run; returns whether its last steps learned nothing."""
    from headway.cli.output import print_json
    from headway.record.folder import RunFolder
    from headway.watch.console import make_console
    from headway.watch.render import render_summary
    from headway.watch.report import write_report
    from headway.watch.summary import read_summary

    folder = RunFolder.open(config.folder)
    try:
        written = str(write_report(folder.root))
    except OSError as error:  # all that it would show is in the lines, and its command writes it again
        written = f"not written ({error.strerror}: {error.filename}); `headway report {folder.root}` makes it"
    summary = read_summary(folder)
    stuck = summary.idle_tail >= _STUCK or summary.idle_tail == summary.step
    if json:
        print_json(summary.to_dict())
        return stuck
    console = make_console()
    console.print(render_summary(summary))
    console.print(f"report: {written}", soft_wrap=True)
    if reason == "preempted":
        console.print(f"stopped with the state saved; the same command goes on: {_again()}", soft_wrap=True)
    else:
        console.print(f"model:  {folder.final_model}", soft_wrap=True)
    if stuck:
        at = summary.step - summary.idle_tail
        said = f"headway: the last {summary.idle_tail} steps updated nothing: these are the weights of step {at}"
        print(f"{said}; lower optim.lr or look at the data", file=sys.stderr)
    return stuck


def _again() -> str:
    """The command that was typed; a supervised rank has another one of its own."""
    return os.environ.get(_COMMAND) or _typed()


def _typed() -> str:
    return shlex.join(["headway", *sys.argv[1:]])


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(text: str) -> None:
    pass


def register(app: typer.Typer) -> None:
    app.command()(train)
