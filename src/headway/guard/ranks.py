"""Which rank is this process? Read from the environment once, checked, never guessed.

A launcher that is half configured gives runs that look right and are not: every process believes that it is rank 0
of 1 and trains alone on the same data. So a partly set, duplicated or contradictory environment is refused, and the
message says which variable is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headway.account.errors import UserError

LAUNCHER_VARIABLE = "HEADWAY_LAUNCHER"
"""Set by `guard.launch` in the ranks that it starts."""

PREPARED_VARIABLE = "HEADWAY_PREPARED"
"""Set by a launcher that has looked at the run file's model and has prepared and verified its data."""
GENERATION_VARIABLE = "HEADWAY_GENERATION"
"""Counts the starts under one supervisor."""

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Slurm's own steps (interactive, batch, extern) have ids at the very top of 32 bits; they are not `srun` tasks.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0
_MPI_FAMILIES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


@dataclass(frozen=True, slots=True)
class RankEnv:
    """This process's place among the ranks.

    `master_addr` and `master_port` are None only when `world_size` is 1.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str | None
    master_port: int | None
    launched_by: Literal["headway", "torchrun", "slurm", "environment"]


def restart_of(environ: Mapping[str, str]) -> int:
    """How often the ranks were started before in the same store, by Headway's supervisor or torchrun; 0 at first.

    torchrun keeps its store over restarts: without a prefix of its own, a generation reads the addresses that the dead
    one left there, and hangs.
    """
    for name in (GENERATION_VARIABLE, "TORCHELASTIC_RESTART_COUNT"):
        if name in environ:
            return _integer(environ, name)
    return 0


def supervised_restart(environ: Mapping[str, str]) -> bool:
    """Whether Headway's own supervisor has started the ranks again, and has written down why."""
    return GENERATION_VARIABLE in environ and _integer(environ, GENERATION_VARIABLE) > 0


@dataclass(frozen=True, slots=True)
class _Task:
    """A process's place according to a job launcher (srun, mpirun)."""

    rank_name: str
    size_name: str
    rank: int
    size: int


def is_prepared(environ: Mapping[str, str]) -> bool:
    """Whether this rank's launcher, or the ranks before a restart, have prepared and verified the data: reading all of
    it again would hold up each recovery by a second a gigabyte."""
    return environ.get(LAUNCHER_VARIABLE) == "local" and (PREPARED_VARIABLE in environ or restart_of(environ) > 0)


def read_rank_env(environ: Mapping[str, str]) -> RankEnv | None:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or an srun task's SLURM_*.

    Returns None when no launcher gave this process a rank: an ordinary shell, also one inside a Slurm allocation
    (SLURM_NTASKS describes the allocation, not this process), and a Slurm step of one task.

    Raises UserError, one line naming the variables, when they are partly set, not integers, out of range,
    or when two launchers disagree (e.g. RANK and SLURM_PROCID, or mpirun without RANK).
    """
    slurm, mpi = _slurm_task(environ), _mpi_task(environ)
    present = [name for name in _RANK_VARIABLES if name in environ]
    if present:
        ranks = _from_variables(environ, present)
        for task in (slurm, mpi):
            if task is not None:
                _refuse_disagreement(environ, ranks, task)
        return ranks
    # mpirun inside a Slurm job starts its daemons with srun: then SLURM_* counts the daemons, not the ranks.
    if mpi is not None and (slurm is None or (slurm.rank, slurm.size) != (mpi.rank, mpi.size)):
        raise UserError(
            f"{mpi.size_name}={mpi.size} but RANK and WORLD_SIZE are not set: start ranks with `headway train`, "
            "torchrun or srun, or export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return None if slurm is None else _from_slurm(environ, slurm)


def _from_variables(environ: Mapping[str, str], present: list[str]) -> RankEnv:
    missing = [name for name in _RANK_VARIABLES if name not in environ]
    values = {name: _integer(environ, name) for name in present}
    alone = values.get("RANK") == 0 and values.get("WORLD_SIZE") == 1
    if missing and not alone:
        shown = ", ".join(f"{name}={values[name]}" for name in present)
        raise UserError(
            f"{' and '.join(missing)} not set, but {shown}: set all of {', '.join(_RANK_VARIABLES)}, or none"
        )
    if LAUNCHER_VARIABLE in environ:
        launched_by: Literal["headway", "torchrun", "environment"] = "headway"
    else:
        launched_by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"
    address, port = _master(environ, values["WORLD_SIZE"], "set both, e.g. MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")
    return _checked(
        RankEnv(
            rank=values["RANK"],
            local_rank=values.get("LOCAL_RANK", 0),
            world_size=values["WORLD_SIZE"],
            local_world_size=values.get("LOCAL_WORLD_SIZE", 1),
            master_addr=address,
            master_port=port,
            launched_by=launched_by,
        )
    )


def _checked(ranks: RankEnv, prefix: str = "") -> RankEnv:
    if ranks.world_size < 1 or ranks.local_world_size < 1:
        raise UserError(
            f"{prefix}WORLD_SIZE={ranks.world_size}, LOCAL_WORLD_SIZE={ranks.local_world_size}: both must be at least 1"
        )
    if not 0 <= ranks.rank < ranks.world_size:
        raise UserError(f"{prefix}RANK={ranks.rank} is not below WORLD_SIZE={ranks.world_size}")
    if not 0 <= ranks.local_rank < ranks.local_world_size:
        raise UserError(f"{prefix}LOCAL_RANK={ranks.local_rank} is not below LOCAL_WORLD_SIZE={ranks.local_world_size}")
    if ranks.local_world_size > ranks.world_size:
        raise UserError(f"{prefix}LOCAL_WORLD_SIZE={ranks.local_world_size} is above WORLD_SIZE={ranks.world_size}")
    if ranks.local_world_size == ranks.world_size and ranks.local_rank != ranks.rank:
        raise UserError(
            f"{prefix}RANK={ranks.rank} and LOCAL_RANK={ranks.local_rank} differ, "
            f"but LOCAL_WORLD_SIZE={ranks.local_world_size} says that all ranks are on this machine"
        )
    return ranks


def _master(environ: Mapping[str, str], world_size: int, advice: str) -> tuple[str | None, int | None]:
    address = environ.get("MASTER_ADDR") or None
    port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    if world_size > 1:
        absent = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
        if absent:
            raise UserError(f"WORLD_SIZE={world_size} but {' and '.join(absent)} not set: {advice}")
    if port is not None and not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT={port} is not a port (1 to 65535)")
    return address, port


def _slurm_task(environ: Mapping[str, str]) -> _Task | None:
    """The srun task that this process is, if its step has more than one task.

    `salloc` and `sbatch` shells have SLURM_NTASKS and even SLURM_PROCID=0 without being one of several tasks; only
    SLURM_STEP_NUM_TASKS of an ordinary step says so.
    """
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_SLURM_STEP:
        return None
    size = _integer(environ, "SLURM_STEP_NUM_TASKS")
    if size <= 1:
        return None
    return _Task("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _integer(environ, "SLURM_PROCID"), size)


def _mpi_task(environ: Mapping[str, str]) -> _Task | None:
    for rank_name, size_name in _MPI_FAMILIES:
        if rank_name in environ and size_name in environ:
            size = _integer(environ, size_name)
            if size > 1:
                return _Task(rank_name, size_name, _integer(environ, rank_name), size)
    return None


def _from_slurm(environ: Mapping[str, str], task: _Task) -> RankEnv:
    local_rank = _integer(environ, "SLURM_LOCALID")
    local_world_size = _slurm_tasks_here(environ)
    address, port = _master(
        environ,
        task.size,
        "under srun export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1) MASTER_PORT=29500",
    )
    return _checked(
        RankEnv(task.rank, local_rank, task.size, local_world_size, address, port, "slurm"),
        prefix="from SLURM_PROCID, SLURM_LOCALID and SLURM_STEP_*: ",
    )


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks of this step on this node, from e.g. SLURM_STEP_TASKS_PER_NODE="4(x2),3" and SLURM_NODEID."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = _integer(environ, "SLURM_NODEID")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read: start the ranks with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise UserError(
            f"SLURM_NODEID={node} is not one of the {len(counts)} nodes in SLURM_STEP_TASKS_PER_NODE={text}"
        )
    return counts[node]


def _refuse_disagreement(environ: Mapping[str, str], ranks: RankEnv, task: _Task) -> None:
    if (task.rank, task.size) == (ranks.rank, ranks.world_size):
        return
    # One torchrun agent per task is the usual way on several nodes: then the tasks count agents, not ranks.
    if "GROUP_WORLD_SIZE" in environ and _integer(environ, "GROUP_WORLD_SIZE") == task.size:
        return
    raise UserError(
        f"RANK={ranks.rank} of WORLD_SIZE={ranks.world_size} contradicts "
        f"{task.rank_name}={task.rank} of {task.size_name}={task.size}: two launchers are nested; use one of them"
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise UserError(f"{name} is not set")
    if re.fullmatch(r"-?\d+", text.strip()) is None:
        raise UserError(f"{name}={text!r} is not an integer")
    return int(text)
