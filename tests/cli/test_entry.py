"""The first moments of the command, before anything of ours or of the libraries is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from headway.cli.main import main
from headway.cli.starting import answer_sigterm, start_is_over

_INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "headway.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, we would be deaf to it
sys.meta_path.insert(0, Interrupt())
sys.argv = ["headway", "doctor"]
{start}
"""


def _interrupted(start: str) -> subprocess.CompletedProcess[str]:
    code = _INTERRUPTED_WHILE_IMPORTING.format(start=start)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_ctrl_c_during_the_imports_ends_it_quietly() -> None:
    done = _interrupted("from headway.cli.entry import main; main()")
    assert done.returncode == -signal.SIGINT and done.stderr == ""


def test_the_plant_shows_a_traceback() -> None:
    assert "KeyboardInterrupt" in _interrupted("from headway.cli.main import main; main()").stderr


_STOPPED_WHILE_IMPORTING = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            child = os.fork()  # what a pool's worker inherits must end it as ever, without a word
            if child:
                child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                print("child", child, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stop())
sys.argv = ["headway", {command!r}, "run.yaml"]
from headway.cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("command", "at", "code"), [("train", "headway.cli.main", 75), ("doctor", "headway.cli.main", -signal.SIGTERM)]
)
def test_sigterm_during_a_start_is_75(command: str, at: str, code: int) -> None:
    """A requeue rule on 75 dropped a job that was preempted while it loaded, and had lost nothing."""
    script = _STOPPED_WHILE_IMPORTING.format(at=at, command=command)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, f"child {-signal.SIGTERM}\n")
    assert done.stderr.count("during the start: nothing is lost") == (code == 75)


def test_the_end_of_a_start_gives_sigterm_back(monkeypatch: pytest.MonkeyPatch) -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        monkeypatch.setenv("HEADWAY_LAUNCHER", "local")  # its launcher says it for all ranks
        answer_sigterm(["train", "run.yaml"])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        monkeypatch.delenv("HEADWAY_LAUNCHER")
        answer_sigterm(["--debug", "launch", "run.yaml"])
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        start_is_over()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_name_that_the_locale_cannot_write_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def writes(*_: object) -> None:
        "ü".encode("ascii")

    monkeypatch.setattr("headway.config.load.load_run", writes)
    with pytest.raises(SystemExit) as end:
        main(["train", "run.yaml"])
    told = capsys.readouterr().err
    assert end.value.code == 2 and "PYTHONUTF8=1" in told and "Traceback" not in told


_JOINED = """
import sys
import time
from headway.cli.main import _join_commands
_join_commands()
print(*sorted(name for name in sys.modules if name.startswith("headway.plan") or "." not in name))
"""


def test_a_start_imports_no_more_of_the_planner_than_its_kinds_of_numbers() -> None:
    """Every `headway train` joins every command: the planner and numpy took most of its start."""
    done = subprocess.run([sys.executable, "-c", _JOINED], capture_output=True, text=True, timeout=60, check=True)
    found = set(done.stdout.split())
    assert {name for name in found if name.startswith("headway.")} == {"headway.plan", "headway.plan.numbers"}
    assert not found & {"numpy", "yaml", "torch", "transformers", "pydantic"}


@pytest.mark.parametrize(
    ("code", "expected", "said"), [("None", 0, ""), ("3", 3, ""), ("'no such file'", 1, "no such file\n")]
)
def test_leaving_does_what_the_interpreter_does_at_its_end(code: str, expected: int, said: str) -> None:
    """What is buffered is written, threads are waited for, handlers run; only modules are not taken apart."""
    script = f"""
import atexit, threading, time
from headway.cli.entry import _leave
class Torn:
    def __del__(self): print("torn down")
kept = Torn()
atexit.register(print, "handler")
def late():
    time.sleep(0.2)
    print("thread")
threading.Thread(target=late).start()
print("text", end=" ")
_leave({code})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "text thread\nhandler\n", said)


def test_the_age_of_the_process_is_its_own_to_a_tick() -> None:
    """A session must not begin before its command: psutil knows the machine's start to a second only."""
    script = "from headway.account.run_clock import process_age_ns\nprint(process_age_ns())"
    for _ in range(3):
        before = time.monotonic_ns()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert 0 < int(done.stdout) <= time.monotonic_ns() - before + 2 * 10**9 // os.sysconf("SC_CLK_TCK")
