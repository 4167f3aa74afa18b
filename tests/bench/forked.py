"""A Python command forked from this process, which has imported torch and transformers: what the speed bench asks of
`subprocess.Popen`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any


class Forked:
    """`python -m MODULE …` or `python SCRIPT …`, with text pipes for stdin and stdout."""

    def __init__(
        self, command: Sequence[str], *, stderr: IO[Any], env: Mapping[str, str] | None = None, **_: object
    ) -> None:
        asked, answered = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _become(command[1:], asked[0], answered[1], stderr.fileno(), os.environ if env is None else env)
        os.close(asked[0])
        os.close(answered[1])
        self.stdin, self.stdout = os.fdopen(asked[1], "w", buffering=1), os.fdopen(answered[0])

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self, text: str, timeout: float) -> None:
        self.stdin.write(text)
        self.stdin.close()
        self.wait()


def _become(words: Sequence[str], stdin: int, stdout: int, stderr: int, env: Mapping[str, str]) -> None:
    code = 1
    try:
        for place, file in enumerate((stdin, stdout, stderr)):
            os.dup2(file, place)
        os.closerange(3, 256)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        given = dict(env)
        os.environ.clear()
        os.environ.update(given)
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
