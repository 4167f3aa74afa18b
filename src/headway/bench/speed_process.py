"""The other end of a contestant's pipe: start it, ask it for the check and for rounds, end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.account.errors import UserError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Round:
    """One contestant's epoch over the fixed documents. account and flops only where it is Headway."""

    seconds: float
    core_seconds: float
    slots: int
    tokens: int
    trained: int
    steps: int
    account: dict[str, Any] | None = None
    flops: dict[str, int] | None = None

    @property
    def speed(self) -> float:
        """Effective tokens/s: real tokens, padding never counted."""
        return self.tokens / self.seconds

    @property
    def core_speed(self) -> float:
        """Effective tokens per second of CPU time: what another job on the machine does not change much."""
        return self.tokens / self.core_seconds

    @property
    def padding(self) -> float:
        return 1 - self.tokens / self.slots


@dataclass
class Contestant:
    """A name, how it is started, and what it has answered so far. died: how it ended before its last round, or ""."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    died: str = ""
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, **self.environment},
            )
        if not self.ready:
            self.ready = self._answer("ready")
        else:
            self._answer("ready")

    def check(self) -> dict[str, Any]:
        return self._ask("check")

    def round(self) -> Round:
        answer = self._ask("round")
        return Round(**{key: answer[key] for key in Round.__dataclass_fields__ if key in answer})

    def end(self) -> None:
        """Asks it to end and waits; kills it where it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate("end\n", timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError, ValueError):
            process.kill()
            process.wait()

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says how it ended
        return self._answer(command)

    def _answer(self, event: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise UserError(f"bench speed: {self.name} ended with code {code}{_how(code)}: {self._last_words()}")
        answer = json.loads(line)
        if answer.pop("event") != event:
            raise RuntimeError(f"{self.name} answered {line!r} where {event} was asked for")
        return answer

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][:300] if lines else 'nothing said'} (--scratch FOLDER keeps {self.log.name})"


def _how(code: int) -> str:
    return " (killed, most likely for memory)" if code == -9 else ""


def headway_command(settings: Path) -> list[str]:
    return [sys.executable, "-m", "headway.bench.speed_headway", str(settings)]


def peer_command(python: str, name: str, settings: Path) -> list[str]:
    return [python, str(HERE / "speed_peer.py"), name, str(settings)]


def reference_check(settings: Path, log: Path) -> dict[str, Any]:
    """Loss and trained tokens of the check's documents, computed one at a time in float32."""
    contestant = Contestant("reference", peer_command(sys.executable, "reference", settings), log)
    with log.open("a") as file:
        contestant._process = subprocess.Popen(contestant.command, stdout=subprocess.PIPE, stderr=file, text=True)
    answer = contestant._answer("check")
    contestant._process.wait()
    return answer
