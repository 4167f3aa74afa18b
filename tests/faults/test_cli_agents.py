"""`headway launch --nnodes` on two machines, seen to its end: one agent as srun starts it, one as a pod does."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import pytest

from headway.bench.faults.case import Case
from headway.bench.faults.material import make_material
from headway.bench.faults.small_run import SmallRun, twin
from headway.record.folder import RunFolder

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
]
# What the starters say about the agent among the agents: its ranks must not take it for their own place.
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NNODES": "2",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURMD_NODENAME": "node-01"}  # fmt: skip
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "run-master-0", "MASTER_PORT": "23456", "HEADWAY_NODE": "pod-1"}


def agent(environ: dict[str, str], words: list[str], log: Path) -> None:
    from headway.cli.main import main

    output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(environ, OMP_NUM_THREADS="1")
    code: object = 1
    try:
        code = main(["launch", *words])
    except SystemExit as end:
        code = end.code
    os._exit(code if isinstance(code, int) else 0)


def test_two_agents_from_the_command_line_train_as_one_machine_does(tmp_path: Path) -> None:
    material = make_material(tmp_path / "material")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    run = [str(material / "run.yaml"), "name=agents", f"out={tmp_path}", "--ranks", "1", "--json"]
    fork = multiprocessing.get_context("fork").Process
    agents = [
        fork(target=agent, args=(SRUN, [*run, "--nnodes", "2", "--rdzv", place], tmp_path / "one.log")),
        fork(target=agent, args=(POD | {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": place}, run, tmp_path / "two.log")),
    ]
    for process in agents:
        process.start()
    for process in agents:
        process.join(120)
        process.kill()
    said = "\n".join((tmp_path / f"{name}.log").read_text() for name in ("one", "two"))
    assert [process.exitcode for process in agents] == [0, 0], said
    found = SmallRun(0, RunFolder(tmp_path / "agents"))
    assert found.incidents == [] and found.history.sessions[0].start.world_size == 2
    assert "on node-01, pod-1" in said or "on pod-1, node-01" in said
    assert (tmp_path / "agents" / "model").is_dir() and not (tmp_path / "agents" / "meeting.json").exists()

    def whole() -> None:
        os._exit(int(twin(Case(0, 0, tmp_path, material)).losses() != found.losses()))

    compared = fork(target=whole)
    compared.start()
    compared.join(120)
    assert compared.exitcode == 0, "losses are not those of two ranks on one machine"
