"""Peaks measured on this machine, kept in one small JSON file (`$HEADWAY_HOME/peaks.json`, default `~/.headway`)."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.account.errors import UserError

VERSION = 1


@dataclass(frozen=True)
class MeasuredPeak:
    """What `headway bench peak` found: FLOP/s and bytes/s of one device (a CPU's with `threads` threads)."""

    device: str
    dtype: str
    flops: float
    shape: tuple[int, int, int]  # the matrix product (m, k, n) that reached it
    threads: int | None = None
    bandwidth: float | None = None
    when: str = ""
    torch: str = ""
    host: str = ""

    def how(self) -> str:
        """Where the number is from, for a report."""
        m, k, n = self.shape
        threads = "" if self.threads is None else f", {self.threads} threads"
        return f"measured {self.when} with a {m}x{k}x{n} matmul{threads} (torch {self.torch})"


class MeasuredPeaks:
    """The file's entries, by device, dtype and threads. A homes folder shared by several machines is one file."""

    def __init__(self, entries: list[MeasuredPeak]) -> None:
        self._entries = {_key(entry): entry for entry in entries}

    @classmethod
    def load(cls, path: Path | None = None) -> MeasuredPeaks:
        """Read the file; a missing one is empty. UserError: it is unreadable, damaged or of a later version."""
        path = path or peaks_path()
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return cls([])
        except OSError as error:
            raise UserError(f"{path}: the file of measured peaks cannot be read: {error.strerror}") from error
        try:
            content = json.loads(text)
            version, items = content["version"], content["peaks"]
            entries = [MeasuredPeak(**{**item, "shape": tuple(item["shape"])}) for item in items]
            damaged = any(not entry.flops > 0 for entry in entries)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: not a file of measured peaks ({error}); delete it and measure again") from error
        if version != VERSION or damaged:
            raise UserError(f"{path}: version {version!r} or its content is not known; delete it and measure again")
        return cls(entries)

    @classmethod
    def usable(cls) -> tuple[MeasuredPeaks, str]:
        """The machine's file for those who can do without: what cannot be used is empty, and the second says why."""
        try:
            return cls.load(), ""
        except UserError as error:
            return cls([]), str(error)

    def get(self, device: str, dtype: str, threads: int | None = None) -> MeasuredPeak | None:
        return self._entries.get((device, dtype, threads))

    def of_device(self, device: str, dtype: str) -> list[MeasuredPeak]:
        """Every thread count this device was measured with."""
        return [entry for entry in self._entries.values() if (entry.device, entry.dtype) == (device, dtype)]

    def entries(self) -> list[MeasuredPeak]:
        return list(self._entries.values())


def save_measured(peak: MeasuredPeak, path: Path | None = None) -> Path:
    """Add or replace one entry; readers see the old file or the new one, and parallel writers lose nothing."""
    path = path or peaks_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        kept = [entry for entry in MeasuredPeaks.load(path).entries() if _key(entry) != _key(peak)]
        content = {"version": VERSION, "peaks": [asdict(entry) for entry in [*kept, peak]]}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    return path


def peaks_path() -> Path:
    """`$HEADWAY_HOME/peaks.json`, by default `~/.headway/peaks.json`."""
    home = os.environ.get("HEADWAY_HOME")
    return (Path(home) if home else Path.home() / ".headway") / "peaks.json"


def cpu_name() -> str:
    """A name for this machine's CPU: its model, its family numbers (virtual machines hide the model) and its CPUs."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    model = facts.get("model name") or platform.processor() or platform.machine()
    numbers = "".join(f" {key.removeprefix('cpu ')} {facts[key]}" for key in ("cpu family", "model") if key in facts)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu: {model}{numbers}, {usable} CPUs"


def _key(entry: MeasuredPeak) -> tuple[str, str, int | None]:
    return entry.device, entry.dtype, entry.threads


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two ranks that measure at once must not overwrite each other's entry."""
    import fcntl

    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
