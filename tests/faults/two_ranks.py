"""Two ranks in two forked processes: the trainer is imported once, and faults are planted by ordinary functions."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.spike_runs import result
from headway.account.run_clock import RunClock
from headway.config.load import load_run
from headway.guard.process_group import close_process_group
from headway.guard.ranks import read_rank_env
from headway.train.build import build_run
from headway.train.loop import train
from headway.train.run import Run
from headway.train.step_lines import StepLines


def ran_on_two(path: Path, *overrides: str, plant: Callable[[Run, int], None]) -> list[dict[str, Any]]:
    """What each rank had: losses (hexadecimal, rank 0's lines), weights, and where it ended."""
    config = load_run(path, ["parallel.ranks=2", *overrides]).config
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [os.fork() or _child(config, rank, port, plant) for rank in (0, 1)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    found = [json.loads(_left(config, rank).read_text()) for rank in (0, 1)]
    assert codes == [0, 0], found
    return found


def _left(config: Any, rank: int) -> Path:
    return config.out / f"{config.name}-rank{rank}.json"


def _child(config: Any, rank: int, port: int, plant: Callable[[Run, int], None]) -> int:
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        run = build_run(config, read_rank_env(os.environ), RunClock(), lambda: [StepLines()], say=lambda text: None)
        plant(run, rank)
        train(run)
        ended = result(run)
        _left(config, rank).write_text(json.dumps({"losses": ended.losses, "weights": ended.weights, "step": run.step}))
        close_process_group()
        code = 0
    except BaseException:
        _left(config, rank).write_text(json.dumps({"error": traceback.format_exc()}))
    os._exit(code)
