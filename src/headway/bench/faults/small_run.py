"""A real training of the campaign's tiny model under the real supervisor, with a fault injected at a step."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.account.events import Incident, Line, Observer, StepLine
from headway.account.run_clock import start_run_clock
from headway.bench.faults.case import Case
from headway.config.load import load_run
from headway.config.run import RunConfig
from headway.guard.beacon import light_beacon
from headway.guard.failure import record_failure
from headway.guard.ledger import Ledger
from headway.guard.memory import NODE
from headway.guard.nodes.leader import Limits
from headway.guard.nodes.meeting import Meeting
from headway.guard.process_group import close_process_group
from headway.guard.processes import Start
from headway.guard.ranks import read_rank_env, restart_of
from headway.guard.supervisor import Supervisor
from headway.record.folder import RunFolder
from headway.record.incidents import read_incidents
from headway.record.jsonl import PatientWriter
from headway.record.sessions import History, read_history
from headway.train.build import build_run
from headway.train.hook import HookPlace
from headway.train.loop import train as run_loop
from headway.train.run import Run

_PATIENCE_S = 120.0
_CODES = {"done": 0, "preempted": 75}


@dataclass
class Strike:
    """Where a fault may strike: at the start of step `step` (from 1) on `rank`, in a start's `generation`."""

    rank: int
    step: int
    generation: int
    run: Run
    folder: Path

    def once(self, name: str) -> bool:
        """True for the first caller over all ranks and generations."""
        try:
            (self.folder / f"struck-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


Fault = Callable[[Strike], None]


@dataclass
class SmallRun:
    """The outcome of a run: exit code, what the run folder says."""

    code: int
    folder: RunFolder
    history: History = field(init=False)
    incidents: list[Incident] = field(init=False)

    def __post_init__(self) -> None:
        self.history = read_history(self.folder)
        self.incidents = read_incidents(self.folder.incidents).items

    def losses(self) -> list[str]:
        """Losses and gradient norms of the kept steps as exact hexadecimal floats."""
        return [f"{_hex(line.loss)} {_hex(line.grad_norm)}" for line in self.history.kept]

    def faults(self) -> list[str]:
        return [incident.fault for incident in self.incidents]


def _hex(value: float | None) -> str:
    return "none" if value is None else value.hex()


def train_small(
    case: Case, name: str, fault: Fault | None = None, *overrides: str, ranks: int = 2, **supervisor: Any
) -> SmallRun:
    """Trains to the end in `case.folder/name`; `fault` is called on every rank before every step.

    The material's run.yaml with `overrides`. Call it in a process with one thread (a campaign's case): ranks are
    forked from it.
    """
    code, folder = _supervise(case, name, fault, overrides, ranks, supervisor)
    return SmallRun(code, folder)


def train_on_hosts(
    case: Case,
    name: str,
    fault: Fault | None,
    names: Sequence[str],
    *overrides: str,
    fewest: int | None = None,
    most: int | None = None,
    through: Callable[[int], int] | None = None,
    **supervisor: Any,
) -> tuple[SmallRun, dict[str, int]]:
    """The same on several "hosts" of this machine: an agent each, with one rank and a shared memory of its own name.
    The first one leads; `fewest` and `most` of them train together, default all. `through`: the port by which the
    others reach the leader's (a proxy's).

    Returns the run (with the worst exit code of the agents that were not killed) and each agent's exit code.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = Limits(fewest or most or len(names), most or len(names), 60.0, steady_s=0.3)
    agents = {}
    for host in names:
        direct = through is None or host == names[0]
        # One that looked into the leader's file would find the direct way.
        place = case.folder / ("meeting.json" if direct else f"meeting-{host}.json")
        meeting = Meeting("127.0.0.1", port if direct else through(port), limits, host, place)  # type: ignore[misc]
        agents[host] = os.fork()
        if not agents[host]:
            os.environ[NODE] = host
            code = 1
            try:
                code, _ = _supervise(case, name, fault, overrides, 1, {**supervisor, "meeting": meeting})
            finally:
                os._exit(code)
        _wait_for_port(port)
    codes = {host: _ended(pid) for host, pid in agents.items()}
    return SmallRun(max(codes.values()), RunFolder(case.folder / name)), codes


def _ended(pid: int) -> int:
    """Its exit code, -9 for one that is not done after two minutes."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _wait_for_port(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.02)


def _supervise(
    case: Case, name: str, fault: Fault | None, overrides: Sequence[str], ranks: int, supervisor: dict[str, Any]
) -> tuple[int, RunFolder]:
    settings = [f"out={case.folder}", f"name={name}", *overrides]
    if "meeting" not in supervisor:
        settings.insert(2, f"parallel.ranks={ranks}")
    config = load_run(case.material / "run.yaml", settings).config
    folder = RunFolder(config.folder).create()

    def entry(argv: Sequence[str]) -> int:
        return _rank(config, fault, os.environ, case.folder)

    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean["OMP_NUM_THREADS"] = "1"
    supervisor.setdefault("rank_files", folder.rank)
    ledger = Ledger(folder.incidents)
    return Supervisor(Start([], entry=entry), ranks, ledger, folder.logs, clean, **supervisor).run(), folder


def twin(case: Case, *overrides: str, ranks: int = 2) -> SmallRun:
    """The same training undisturbed; made once for each way to run it, and shared by the cases of a campaign."""
    name = f"twin-{ranks}-{'-'.join(overrides) or 'plain'}".replace("/", "_")
    shared = Case(0, 0, case.material, case.material)
    folder = RunFolder(case.material / name)
    if not (folder.root / "whole").is_file():
        run = train_small(shared, name, None, *overrides, ranks=ranks)
        if run.code or run.incidents:
            raise RuntimeError(f"the undisturbed run failed: exit {run.code}, {run.faults()}")
        (folder.root / "whole").touch()
    return SmallRun(0, folder)


class _MetricsFile:
    def __init__(self, folder: RunFolder) -> None:
        self._writer = PatientWriter(folder.metrics)

    def tell(self, line: Line) -> None:
        self._writer.append(line)

    def close(self) -> None:
        self._writer.close()


class _Injector:
    """The fault as a hook of the loop, on every rank."""

    def __init__(self, fault: Fault, place: HookPlace, folder: Path) -> None:
        self._fault, self._place, self._folder = fault, place, folder
        self.run: Run | None = None

    def begin_step(self, step: int) -> list[Line]:
        assert self.run is not None
        self._fault(Strike(self._place.rank, step, restart_of(os.environ), self.run, self._folder))
        return []

    def pause(self) -> None: ...

    def close(self) -> list[Line]:
        return []


def _rank(config: RunConfig, fault: Fault | None, environ: Mapping[str, str], folder: Path) -> int:
    env = read_rank_env(environ)
    assert env is not None
    clock = start_run_clock()
    clock.watch = beacon = light_beacon(environ, env.rank)
    injectors: list[_Injector] = []

    def hook(place: HookPlace) -> _Injector | None:
        if fault is None:
            return None
        injectors.append(_Injector(fault, place, folder))
        return injectors[0]

    def observers() -> list[Observer]:
        return [_MetricsFile(RunFolder(config.folder))] if env.rank == 0 else []

    try:
        run = build_run(config, env, clock, observers, lambda text: None, hook, beacon)
        for injector in injectors:
            injector.run = run
        reason = run_loop(run)
    except BaseException as error:
        record_failure(error)
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, UserError) else 1
    close_process_group()
    return _CODES[reason]


def step_times(history: History) -> list[float]:
    """Wall clock of every step line in seconds."""
    lines: list[StepLine] = [line for session in history.sessions for line in session.steps]
    return [line.wall_ns / 1e9 for line in lines]


def same_documents(one: Sequence[StepLine], two: Sequence[StepLine]) -> bool:
    """Whether two runs had the same documents in every step, and losses within rounding of each other."""
    return len(one) == len(two) and all(
        (a.tokens, a.trained_tokens, a.documents) == (b.tokens, b.trained_tokens, b.documents)
        and abs((a.loss or 0) - (b.loss or 0)) < 1e-4
        for a, b in zip(one, two, strict=True)
    )
