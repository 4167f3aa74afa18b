"""Rank variables: read exactly, or refused with the name of what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.guard.ranks import (
    GENERATION_VARIABLE,
    LAUNCHER_VARIABLE,
    RankEnv,
    read_rank_env,
    restart_of,
    supervised_restart,
)

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_WORLD_SIZE": "2",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}
SBATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
# salloc with an interactive step: a step number near 2**32, one task.
INTERACTIVE = SBATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        SALLOC,
        SBATCH,
        INTERACTIVE,
        INTERACTIVE | {"SLURM_STEP_NUM_TASKS": "8"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=["shell", "master-only", "salloc", "sbatch", "interactive-step", "interactive-many", "srun-one", "mpirun-one"],
)
def test_no_rank_is_read_where_no_launcher_gave_one(environ: dict[str, str]) -> None:
    assert read_rank_env(environ) is None


def test_torchrun_srun_and_plain_variables_are_read() -> None:
    assert read_rank_env(TORCHRUN) == RankEnv(3, 1, 4, 2, "10.0.0.1", 29500, "torchrun")
    assert read_rank_env(SRUN) == RankEnv(2, 0, 3, 1, "node1", 29500, "slurm")
    plain = without(TORCHRUN, "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE")
    assert read_rank_env(plain) == RankEnv(3, 1, 4, 2, "10.0.0.1", 29500, "environment")
    ours = read_rank_env(plain | {LAUNCHER_VARIABLE: "local"} | SALLOC)
    assert ours is not None and ours.launched_by == "headway"
    assert read_rank_env({"RANK": "0", "WORLD_SIZE": "1"}) == RankEnv(0, 0, 1, 1, None, None, "environment")


def test_one_torchrun_agent_per_srun_task_is_no_contradiction() -> None:
    slurm = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    ranks = read_rank_env(slurm | TORCHRUN)
    assert ranks is not None and (ranks.rank, ranks.world_size) == (3, 4)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_each_missing_variable_is_named(name: str) -> None:
    with pytest.raises(UserError, match=rf"\b{name}\b.* not set") as caught:
        read_rank_env(without(TORCHRUN, name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "one"}, "RANK='one' is not an integer"),
        ({"RANK": ""}, "RANK='' is not an integer"),
        ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 is above WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "4"}, "RANK=3 and LOCAL_RANK=1 differ"),
        ({"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (SRUN | {"MASTER_ADDR": "10.0.0.1"}, "SLURM_PROCID=2 of SLURM_STEP_NUM_TASKS=3"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_RANK=0"),
    ],
)
def test_contradictions_are_refused_and_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_rank_env(TORCHRUN | change)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(SRUN, "MASTER_ADDR"), "MASTER_ADDR not set: under srun export"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE='two'"),
        (SRUN | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 but RANK"),
        # mpirun's daemons, one a node, are srun tasks; read as ranks they would train on 2 instead of 8.
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "PMI_SIZE=8 but RANK"),
    ],
)
def test_job_launchers_that_do_not_say_enough_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_rank_env(environ)
    assert words in str(caught.value)


@settings(deadline=None)
@given(nodes=st.integers(1, 5), per_node=st.integers(1, 8), data=st.data())
def test_every_rank_of_every_layout_is_read_back(nodes: int, per_node: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, nodes * per_node - 1))
    size, local = nodes * per_node, rank % per_node
    master = {"MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    plain = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(per_node)}
    expected = RankEnv(rank, local, size, per_node, "host", 1234, "environment")
    assert read_rank_env(plain | master) == expected
    slurm = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
    }
    found = read_rank_env(slurm | master)
    assert found == (None if size == 1 else RankEnv(rank, local, size, per_node, "host", 1234, "slurm"))
    assert read_rank_env(slurm | plain | master) == expected  # both, and they agree


def test_only_our_own_supervisor_is_said_to_have_written_a_death_down() -> None:
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert restart_of(again) == 1 and not supervised_restart(again) and not supervised_restart({})
    assert not supervised_restart({GENERATION_VARIABLE: "0"}) and supervised_restart({GENERATION_VARIABLE: "1"})
