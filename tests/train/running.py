"""Runs `headway train` as a user would, in a process of its own, and reads what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headway.record.folder import RunFolder
from headway.record.sessions import History, read_history


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return {**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


def command(run_file: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "headway", "train", str(run_file), *overrides]


def run(run_file: Path, *overrides: str, expect: int = 0, **extra: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(run_file, *overrides), env=environment(**extra), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def history(run_file: Path, name: str = "tiny") -> History:
    return read_history(RunFolder(run_file.parent / "runs" / name))


def losses(run_file: Path, name: str = "tiny") -> list[str]:
    """Losses of the kept steps, as exact hexadecimal floats."""
    return [line.loss.hex() if line.loss is not None else "none" for line in history(run_file, name).kept]
