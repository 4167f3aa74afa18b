"""The process that asks NVML every two seconds, and writes down what it was told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from headway.guard.processes import can_fork, die_with_parent
from headway.guard.vitals import FILE, Card, read_card

_EVERY_S = 2.0
DRIVER = Path("/dev/nvidiactl")


def has_cards() -> bool:
    """Whether there is something to ask: a driver, and a binding to its library (`pynvml`)."""
    return DRIVER.exists() and ("pynvml" in sys.modules or find_spec("pynvml") is not None)


class Reader:
    """The process, for as long as the context is open. Nothing at all on a machine without cards."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid = folder, 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Reader:
        if not has_cards():
            return self
        ask = die_with_parent()
        if can_fork():
            self._pid = os.fork()
            if not self._pid:
                _alone(self._folder, ask)
        else:
            command = [sys.executable, "-m", "headway.guard.vitals_main", str(self._folder)]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=ask, process_group=0
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


def _alone(folder: Path, ask: Any) -> None:
    try:
        os.setpgid(0, 0)
        if ask is not None:
            ask()
        read_for_ever(folder)
    finally:
        os._exit(0)


def read_for_ever(folder: Path, rounds: int | None = None, every_s: float = _EVERY_S) -> None:
    """Returns when NVML is not there, or after `rounds`."""
    import pynvml as nvml  # type: ignore[import-untyped, import-not-found, unused-ignore]

    try:
        nvml.nvmlInit()
        count = int(nvml.nvmlDeviceGetCount())
    except Exception:  # no driver, another version, no right: there is nothing to tell
        return
    events, xids = _watch_xids(nvml, count), dict[int, list[int]]()
    done = 0
    while rounds is None or done < rounds:
        cards = [read_card(nvml, index) for index in range(count)]
        _collect_xids(nvml, events, xids)
        write(folder, [msgspec.structs.replace(card, xids=xids.get(card.index, [])) for card in cards])
        done += 1
        time.sleep(every_s)


def write(folder: Path, cards: list[Card]) -> None:
    part = folder / f"{FILE}.part"
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(cards))
        part.replace(folder / FILE)


def _watch_xids(nvml: Any, count: int) -> Any:
    try:
        events = nvml.nvmlEventSetCreate()
        for index in range(count):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except Exception:  # not every card tells events
        return None
    return events


def _collect_xids(nvml: Any, events: Any, xids: dict[int, list[int]]) -> None:
    with contextlib.suppress(Exception):  # a time-out is an error, too: nothing has happened
        while events is not None:
            event = nvml.nvmlEventSetWait_v2(events, 1)
            index = int(nvml.nvmlDeviceGetIndex(event.device))
            xids.setdefault(index, []).append(int(event.eventData))


if __name__ == "__main__":
    read_for_ever(Path(sys.argv[1]))
