"""A small training of several gloo ranks under the real supervisor, forked from the test: a case takes well under a second."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from headway.account.errors import Stopped, UserError
from headway.account.events import Incident
from headway.guard.beacon import Beacon, light_beacon
from headway.guard.failure import record_failure
from headway.guard.hosts import HostList
from headway.guard.ledger import Ledger
from headway.guard.nodes.leader import Limits
from headway.guard.nodes.meeting import Meeting
from headway.guard.process_group import close_process_group, init_process_group
from headway.guard.processes import Start
from headway.guard.ranks import read_rank_env, restart_of
from headway.guard.signals import StopRequest, agree_to_stop, max_over_ranks
from headway.guard.supervisor import Supervisor
from headway.record.incidents import read_incidents

Fault = Callable[["Place"], None]


@dataclass
class Place:
    """Where a rank is when a fault may strike: in step `step` (counted from 1) of `generation`."""

    rank: int
    step: int
    generation: int
    folder: Path
    beacon: Beacon

    def once(self, name: str) -> bool:
        """True for the first caller over all generations."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def train(
    folder: Path, fault: Fault, steps: int = 12, every: int = 4, step_s: float = 0.005, dies_at_start: bool = False
) -> int:
    """Each step sums one number over the ranks and keeps it; rank 0 saves every `every` steps. The exit code."""
    environ = os.environ
    env = read_rank_env(environ)
    assert env is not None
    beacon = light_beacon(environ, env.rank)
    assert beacon is not None
    init_process_group(env, torch.device("cpu"), timeout_s=60, restart=restart_of(environ))
    saved = folder / "saved.json"
    state: list[float] = json.loads(saved.read_text()) if saved.exists() else []
    if dies_at_start:
        os.kill(os.getpid(), signal.SIGKILL)
    beacon.resumed(len(state))
    with StopRequest() as stop:
        while len(state) < steps:
            beacon.begin_step(documents=10 * len(state))
            beacon.enter("compute.forward")
            time.sleep(step_s)
            fault(Place(env.rank, len(state) + 1, restart_of(environ), folder, beacon))
            beacon.leave()
            beacon.enter("comm.dp")
            box = torch.tensor([float(len(state) + env.rank)])
            dist.all_reduce(box)
            beacon.leave()
            state.append(float(box))
            beacon.finish_step(len(state))
            beacon.told()
            stopped = agree_to_stop(stop)
            if stopped and max_over_ranks(int((folder / "full").exists())):
                for name in ("full", "slow"):
                    (folder / name).unlink(missing_ok=True)
                raise Stopped(f"step {len(state)} could not be saved: no room")
            if stopped or len(state) % every == 0 or len(state) == steps:
                if env.rank == 0:
                    (folder / "saving").write_text(json.dumps(state))
                    (folder / "saving").rename(saved)
                max_over_ranks(0)
            if stopped:
                close_process_group()
                return 75
    close_process_group()
    return 0


@dataclass
class Ended:
    code: int | None
    incidents: list[Incident]
    state: list[float]
    err: str


def supervise(tmp: Path, fault: Fault, ranks: int = 2, timeout: float = 60.0, **options: Any) -> Ended:
    """Runs the training to its end; `code` None when it had to be killed after `timeout` seconds."""
    knobs = {name: options.pop(name) for name in ("steps", "every", "step_s", "dies_at_start") if name in options}

    def entry(argv: Sequence[str]) -> int:
        try:
            return train(tmp, fault, **knobs)
        except BaseException as error:
            record_failure(error)
            if isinstance(error, UserError):
                return error.exit_code
            raise

    def main() -> None:
        sys.stderr = open(tmp / "err.txt", "w")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), 2)
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        start = Start([], entry=entry)
        code = Supervisor(start, ranks, Ledger(tmp / "incidents.jsonl"), tmp / "logs", clean, **options).run()
        sys.stderr.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join(timeout)
    code = process.exitcode
    process.kill()
    process.join()
    saved = tmp / "saved.json"
    state = json.loads(saved.read_text()) if saved.exists() else []
    return Ended(code, read_incidents(tmp / "incidents.jsonl").items, state, (tmp / "err.txt").read_text())


def twin(steps: int = 12, ranks: int = 2) -> list[float]:
    """What an undisturbed training keeps."""
    return [float(sum(step + rank for rank in range(ranks))) for step in range(steps)]


class Hosts:
    """Several agents on this machine, each under a host's name, that train one run together."""

    def __init__(self, tmp: Path, fault: Fault, least: int, most: int, **options: Any) -> None:
        self.tmp, self._fault, self._options = tmp, fault, options
        self._knobs = {name: options.pop(name) for name in ("steps", "every", "step_s") if name in options}
        self._meeting = {name: options.pop(name) for name in ("lost_s", "patience_s") if name in options}
        self._limits = Limits(least, most, options.pop("wait_s", 60.0), self._meeting.get("patience_s", 60.0), 0.3)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.agents: dict[str, multiprocessing.process.BaseProcess] = {}

    def start(self, *names: str) -> None:
        for name in names:
            process = multiprocessing.get_context("fork").Process(target=self._agent, args=(name,))
            process.start()
            self.agents[name] = process

    def _agent(self, name: str) -> None:
        def entry(argv: Sequence[str]) -> int:
            try:
                return train(self.tmp, self._fault, **self._knobs)
            except BaseException as error:
                record_failure(error)
                raise

        sys.stderr = open(self.tmp / f"{name}.txt", "a")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), 2)
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"HEADWAY_NODE": name}
        code = Supervisor(
            Start([], entry=entry), 1, Ledger(self.tmp / "incidents.jsonl", host=name), self.tmp / "logs", clean,
            hosts=HostList(self.tmp / "hosts.json"),
            meeting=Meeting("127.0.0.1", self.port, self._limits, name, self.tmp / "meeting.json", **self._meeting),
            **self._options,
        ).run()  # fmt: skip
        sys.stderr.flush()
        os._exit(code)

    def pids(self, name: str) -> list[int]:
        """All processes of a host."""
        pid = self.agents[name].pid
        assert pid is not None
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]

    def send(self, name: str, number: int) -> None:
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def until(self, true: Callable[[], bool], timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def opened(self) -> None:
        """Returns when the first agent leads."""
        self.until(lambda: "1 machine here" in self.said())

    def wait(self, timeout: float = 60.0) -> dict[str, int | None]:
        """The agents' exit codes; None for those that had to be killed."""
        deadline = time.monotonic() + timeout
        codes = {}
        for name, process in self.agents.items():
            process.join(max(0.0, deadline - time.monotonic()))
            codes[name] = process.exitcode
            process.kill()
            process.join()
        return codes

    @property
    def state(self) -> list[float]:
        return json.loads((self.tmp / "saved.json").read_text())

    @property
    def incidents(self) -> list[Incident]:
        return read_incidents(self.tmp / "incidents.jsonl").items

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.tmp.glob("*.txt")))
