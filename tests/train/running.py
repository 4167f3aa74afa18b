"""Runs `headway train` as a user would, and reads what it left."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.cli.main import main
from headway.record.folder import RunFolder
from headway.record.sessions import History, read_history
from train.serving import Started


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return {**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run(run_file: Path, *overrides: str, expect: int = 0, torchrun: Sequence[str] = ()) -> Done:
    """A run to its end. One rank runs in this process (libraries take seconds to import), several in their own."""
    several = torchrun or any(text.startswith("parallel.ranks=") for text in overrides)
    done = _in_processes(run_file, overrides, torchrun) if several else _here(run_file, overrides)
    assert done.code == expect, f"exit {done.code}\n{done.out[-3000:]}\n{done.err[-3000:]}"
    return done


def _in_processes(run_file: Path, overrides: Sequence[str], torchrun: Sequence[str]) -> Done:
    started = start(run_file, *overrides, torchrun=torchrun)
    code = started.wait(800)
    return Done(code, *(path.read_text(errors="replace") for path in (started.out, started.err)))


def start(run_file: Path, *overrides: str, torchrun: Sequence[str] = (), out: Path | None = None) -> Started:
    """A run in a process of its own, that can be killed; under torchrun with these options of its own."""
    folder = Path(tempfile.mkdtemp(prefix="output-", dir=run_file.parent))
    argv = ["train", str(run_file), *overrides]
    return Started(argv, environment(), out or folder / "out", folder / "err", torchrun)


def _here(run_file: Path, overrides: Sequence[str]) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["train", str(run_file), *overrides])
        except SystemExit as end:
            return Done(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("the command did not exit")


def history(run_file: Path, name: str = "tiny") -> History:
    return read_history(RunFolder(run_file.parent / "runs" / name))


def losses(run_file: Path, name: str = "tiny") -> list[str]:
    """Losses of the kept steps, as exact hexadecimal floats."""
    return [line.loss.hex() if line.loss is not None else "none" for line in history(run_file, name).kept]
