"""`headway` in processes of their own, forked from this one, which has imported the trainer: seconds saved a start."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

import headway
from headway.guard.garbage import keep

_FORK = multiprocessing.get_context("fork")
_MODULE = str(Path(headway.__file__).with_name("__main__.py"))


class Started:
    """A command that runs, the leader of a process group of its own."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], out: Path, err: Path, torchrun: Sequence[str] = ()
    ) -> None:
        self.out, self.err = out, err
        _preload()
        self._process: ForkProcess = _FORK.Process(
            target=_serve, args=(list(argv), dict(env), out, err, list(torchrun))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def is_running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def send_to_all(self, number: int) -> None:
        """To every process that the command started, too."""
        os.killpg(self.pid, number)

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal. Raises AssertionError (and ends it) when it runs longer."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.send_to_all(9)
            raise AssertionError(f"still running after {timeout} s\n{self.err.read_text(errors='replace')[-3000:]}")
        return self._process.exitcode


def _preload() -> None:
    """Whatever a run imports on its way: once here, not in every process."""
    for name in ("headway.cli.main", "headway.cli.train", "headway.train.build", "headway.watch.report"):
        importlib.import_module(name)


def _serve(argv: list[str], env: dict[str, str], out: Path, err: Path, torchrun: list[str]) -> None:
    os.setsid()
    keep()  # the libraries, else every run begins with a look through them
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    # As a new Python would find them; the test's own are pytest's.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = ["headway", *argv]
    if torchrun:
        from torch.distributed.run import main as torchrun_main

        # The whole of torchrun, but for this: its ranks are forked from here instead of starting Python again.
        torchrun_main([*torchrun, "--start-method", "fork", "--run-path", _MODULE, *argv])
        return
    from headway.cli.main import main

    main(argv)
