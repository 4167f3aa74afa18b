"""Ranks start together, end together, and the one that failed first is named: the supervisor where it starts nothing anew."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.account.errors import UserError
from headway.guard.deaths import Judgement
from headway.guard.failure import RecordedFailure, read_failure, record_failure
from headway.guard.ledger import Ledger
from headway.guard.process_group import close_process_group, init_process_group
from headway.guard.processes import Start
from headway.guard.ranks import read_rank_env
from headway.guard.supervisor import Supervisor

SOURCE = Path(__file__).resolve().parents[2] / "src"

# What every rank script begins with. `wait_for(name)` waits for a file that another rank or the test makes.
PRELUDE = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(SOURCE)!r})
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def mark(name, text=""):
    (folder / (name + ".part")).write_text(text)
    os.replace(folder / (name + ".part"), folder / name)
def wait_for(name):
    deadline = time.monotonic() + 120
    while not (folder / name).exists():
        if time.monotonic() > deadline: sys.exit(99)
        time.sleep(0.01)
mark(f"pid-{{rank}}", str(os.getpid()))
"""


@pytest.fixture
def clean_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@pytest.fixture
def launch(tmp_path: Path, clean_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a killed launcher cannot tidy up

    def start(n: int, body: str, **options: object) -> int:
        script = tmp_path / "rank.py"
        script.write_text(PRELUDE + body)
        return run_once(tmp_path, n, script, options.pop("env", clean_env), **options)

    return start


def run_once(tmp: Path, n: int, script: Path, env: dict[str, str], **options: object) -> int:
    start = Start([str(tmp)], command=[sys.executable, str(script)])
    never_again = Judgement(stuck=0)
    return Supervisor(
        start, n, Ledger(tmp / "incidents.jsonl"), tmp / "logs", env, judgement=never_again, **options
    ).run()


def wait_for(path: Path) -> Path:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.01)
    return path


def gone(pid: int) -> bool:
    """True once the process has ended (a zombie has)."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def when(path: Path, act: Callable[[], None]) -> threading.Thread:
    """Acts from another thread as soon as `path` exists; the launcher keeps the main thread."""
    thread = threading.Thread(target=lambda: (wait_for(path), act()), daemon=True)
    thread.start()
    return thread


def test_every_rank_gets_its_place(launch: Callable[..., int], tmp_path: Path, clean_env: dict[str, str]) -> None:
    body = 'mark(f"env-{rank}", json.dumps(dict(os.environ)))'
    assert launch(3, body, env=without_threads(clean_env)) == 0
    found = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(3)]
    for rank, environ in enumerate(found):
        ranks = read_rank_env(environ)
        assert ranks is not None and ranks.launched_by == "headway"
        assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.local_world_size) == (rank, rank, 3, 3)
        assert (ranks.master_addr, ranks.master_port) == ("127.0.0.1", int(found[0]["MASTER_PORT"]))
        assert environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert launch(1, body, env=clean_env | {"OMP_NUM_THREADS": "7"}) == 0
    assert json.loads((tmp_path / "env-0").read_text())["OMP_NUM_THREADS"] == "7"


def without_threads(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}


def test_a_process_that_is_a_rank_starts_none(launch: Callable[..., int]) -> None:
    with pytest.raises(UserError, match="RANK already set"):
        launch(2, "", env={"RANK": "0"})
    with pytest.raises(UserError, match="at least 1"):
        launch(0, "")


def test_rank_0_speaks_and_the_others_write_logs(launch: Callable[..., int], tmp_path: Path, capfd) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00001.log").write_text("from the run before\n")
    assert launch(2, 'print(f"rank {rank} here"); print(f"rank {rank} complains", file=sys.stderr)') == 0
    out, err = capfd.readouterr()
    assert out == "rank 0 here\n" and err == "rank 0 complains\n"
    log = (tmp_path / "logs" / "rank-00001.log").read_text()
    assert log.startswith("from the run before\n") and "rank 1 here" in log and "rank 1 complains" in log


def test_a_crash_ends_the_others_and_is_named(launch: Callable[..., int], tmp_path: Path, capfd) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00001.log").write_text("from the run before\n")
    body = """
if rank == 1:
    wait_for("pid-0"); wait_for("pid-2")
    print("the reason"); sys.exit(7)
time.sleep(60)
"""
    assert launch(3, body) == 7
    err = capfd.readouterr().err
    assert "rank 1 failed with exit code 7" in err and "the reason" in err and "rank-00001.log" in err
    assert "from the run before" not in err
    for rank in (0, 2):
        assert gone(int((tmp_path / f"pid-{rank}").read_text()))


def test_a_killed_rank_is_named_though_another_notices_first(launch: Callable[..., int], capfd) -> None:
    body = """
from headway.guard.failure import record_failure
if rank == 1:
    wait_for("pid-0"); os.kill(os.getpid(), signal.SIGKILL)
wait_for("pid-1")
while Path(f"/proc/{(folder / 'pid-1').read_text()}").exists() and "Z" not in Path(
    f"/proc/{(folder / 'pid-1').read_text()}/stat").read_text().rpartition(")")[2].split()[0]: pass
record_failure(RuntimeError("Connection closed by peer")); sys.exit(1)
"""
    assert launch(2, body) == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL (out of memory, or by hand)" in capfd.readouterr().err


def test_the_first_failure_counts_not_the_first_exit(launch: Callable[..., int], capfd) -> None:
    body = """
from headway.guard.failure import record_failure
if rank == 1:
    record_failure(ValueError("the cause")); mark("failed"); time.sleep(60)
wait_for("failed")
record_failure(RuntimeError("Connection closed by peer")); sys.exit(1)
"""
    assert launch(2, body) == 1
    assert "rank 1 failed with exit code 1 (ValueError: the cause)" in capfd.readouterr().err


def test_a_users_mistake_is_said_once(launch: Callable[..., int], capfd) -> None:
    body = """
from headway.account.errors import UserError
from headway.guard.failure import record_failure
problem = UserError("run.yaml: data.seq_len must be positive")
record_failure(problem); print(f"headway: {problem}", file=sys.stderr); sys.exit(2)
"""
    assert launch(3, body) == 2
    assert capfd.readouterr().err == "headway: run.yaml: data.seq_len must be positive\n"


def test_a_users_mistake_that_only_another_rank_sees_is_said_too(launch: Callable[..., int], capfd) -> None:
    body = """
from headway.account.errors import UserError
from headway.guard.failure import record_failure
if rank == 1:
    record_failure(UserError("no such file on this rank")); sys.exit(2)
time.sleep(60)
"""
    assert launch(2, body, grace_s=0.3) == 2
    assert capfd.readouterr().err == "headway: rank 1: no such file on this rank\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_the_state_is_saved(
    launch: Callable[..., int], tmp_path: Path, number: signal.Signals, capfd
) -> None:
    body = """
got = []
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda n, _: got.append(n))
mark(f"ready-{rank}"); wait_for("ready-0"); wait_for("ready-1"); mark(f"both-{rank}")
while not got: time.sleep(0.01)
time.sleep(0.3); mark(f"saved-{rank}", json.dumps(got)); sys.exit(75)
"""
    when(tmp_path / "both-0", lambda: os.kill(os.getpid(), number))
    former = signal.getsignal(number)
    assert launch(2, body) == 75
    assert [json.loads((tmp_path / f"saved-{rank}").read_text()) for rank in (0, 1)] == [[number], [number]]
    assert capfd.readouterr().err == "" and signal.getsignal(number) == former


def test_the_second_signal_kills(launch: Callable[..., int], tmp_path: Path, capfd) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: mark(f"asked-{rank}")); mark(f"ready-{rank}"); wait_for("ready-1")
mark(f"both-{rank}")
while True: time.sleep(0.05)
"""
    when(tmp_path / "both-0", lambda: os.kill(os.getpid(), signal.SIGTERM))
    when(tmp_path / "asked-1", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert launch(2, body) == 128 + signal.SIGINT
    assert "killed 2 ranks on the second Ctrl-C" in capfd.readouterr().err


def test_a_rank_stopped_before_it_could_listen(launch: Callable[..., int], tmp_path: Path, capfd) -> None:
    when(tmp_path / "pid-1", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launch(2, "time.sleep(60)") == 75, "no step was made: a job that a scheduler may start again"
    assert "stopped by SIGTERM during the start: nothing is lost" in capfd.readouterr().err


def test_ranks_die_with_a_killed_launcher(launch: Callable[..., int], tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(2, body))
    launcher.start()
    pids = [int(wait_for(tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    launcher.kill()
    launcher.join()
    assert all(gone(pid) for pid in pids)


def meets(kind: str, folder: Path) -> int:
    """A rank of one of two launches: the light one is there as long as the other one sums over its ranks."""
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]

    def mark(name: str, text: str) -> None:
        (folder / f"{name}.part").write_text(text)
        (folder / f"{name}.part").rename(folder / name)

    if kind == "light":
        socket.create_connection(("127.0.0.1", int(port)), timeout=30).close()
        mark(f"light-{rank}", port)
        for each in (0, 1):
            wait_for(folder / f"sum-{each}")
        return 0
    for each in (0, 1):
        wait_for(folder / f"light-{each}")
    init_process_group(read_rank_env(os.environ), torch.device("cpu"), timeout_s=60)
    box = torch.tensor([1.0 + int(rank)])
    dist.all_reduce(box)
    mark(f"sum-{rank}", f"{float(box)} {port}")
    close_process_group()
    return 0


def test_two_launches_at_once_do_not_meet(tmp_path: Path, clean_env: dict[str, str]) -> None:
    def launches(kind: str) -> None:
        start = Start([], entry=lambda argv: meets(kind, tmp_path))
        ledger = Ledger(tmp_path / f"{kind}.jsonl")
        os._exit(Supervisor(start, 2, ledger, tmp_path / kind, clean_env, judgement=Judgement(stuck=0)).run())

    fork = multiprocessing.get_context("fork").Process
    launchers = [fork(target=launches, args=(kind,)) for kind in ("light", "torch")]
    for launcher in launchers:
        launcher.start()
    for launcher in launchers:
        launcher.join(200)
        launcher.kill()
    assert [launcher.exitcode for launcher in launchers] == [0, 0]
    sums = {(tmp_path / f"sum-{rank}").read_text() for rank in (0, 1)}
    assert len(sums) == 1
    total, port = sums.pop().split()
    assert total == "3.0" and port != (tmp_path / "light-0").read_text() == (tmp_path / "light-1").read_text()


def test_failures_are_recorded_once_and_bad_records_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "failure.json"
    record_failure(ValueError("nobody listens"))
    monkeypatch.setenv("HEADWAY_FAILURE_FILE", str(path))
    record_failure(UserError("first"))
    record_failure(ValueError("second"))
    found = read_failure(path)
    assert isinstance(found, RecordedFailure) and (found.user, found.message) == (True, "first")
    path.write_text('{"at": 1')
    assert read_failure(path) is None and read_failure(tmp_path / "none") is None
    monkeypatch.setenv("HEADWAY_FAILURE_FILE", str(tmp_path / "no" / "such" / "folder"))
    record_failure(ValueError("must not hide the cause"))
