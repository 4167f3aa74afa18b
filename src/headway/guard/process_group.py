"""PyTorch's process group for one run: started with checks, shared by every room, closed without hanging."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from headway.account.errors import UserError
from headway.guard.control import Control
from headway.guard.ranks import RankEnv

# The control group of the present default group; a test that starts a second default group gets a new one.
_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


def init_process_group(
    rank_env: RankEnv | None,
    device: torch.device,
    *,
    timeout_s: float = 1800.0,
    restart: int = 0,
) -> None:
    """Joins the ranks. `rank_env` None: one process without a group, nothing to do.

    Backends: "cpu:gloo,cuda:nccl" when `device` is CUDA, "gloo" on CPU; on CUDA the current device becomes
    `cuda:local_rank`. `timeout_s` (seconds) bounds the meeting and every collective. `restart` separates the
    generations of a restarted job in one store: keys of a dead generation made the next one hang.

    Raises UserError when the device does not exist, the port is taken, or two processes claim one rank.
    """
    if rank_env is None:
        return
    if device.type == "cuda":
        present = torch.cuda.device_count()
        if rank_env.local_rank >= present:
            raise UserError(
                f"LOCAL_RANK={rank_env.local_rank} needs device cuda:{rank_env.local_rank}, but {present} are visible: "
                "start fewer ranks or widen CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(rank_env.local_rank)
    timeout = timedelta(seconds=timeout_s)
    store = dist.PrefixStore(f"headway/{restart}", _store(rank_env, timeout))
    # Two processes with one rank would overwrite each other's addresses, and the group would hang or, worse, work.
    if store.add(f"claimed/{rank_env.rank}", 1) > 1:
        raise UserError(f"RANK={rank_env.rank} was given to two processes: every rank needs a number of its own")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank_env.rank,
        world_size=rank_env.world_size,
        timeout=timeout,
    )
    control_group(timeout_s)


def control_group(timeout_s: float = 1800.0) -> dist.ProcessGroup | None:
    """The gloo group that `guard` talks over; None without a process group.

    Collective on its first call after a process group was made by hand; `init_process_group` makes it at once. It is
    apart from the default group, so that agreements never interleave with the training's collectives. `timeout_s`
    (seconds) counts when the group is made; it bounds how long the ranks wait for the slowest writer of a checkpoint.
    """
    global _control
    if not dist.is_available() or not dist.is_initialized():
        return None
    world = dist.distributed_c10d._get_default_group()
    if _control is None or _control[0] is not world:
        _control = (world, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
    return _control[1]


def existing_control_group() -> dist.ProcessGroup | None:
    """The control group if it has been made; makes none, so that any thread may ask at any time."""
    return None if _control is None else _control[1]


def control() -> Control:
    """The ranks' control channel (this process alone, without a process group)."""
    return Control(control_group())


def is_main() -> bool:
    """True on rank 0, and in a process without a group."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def barrier() -> None:
    """Waits on the CPU until every rank is here; does not wait for CUDA work."""
    group = control_group()
    if group is not None:
        dist.barrier(group=group)


def close_process_group(timeout_s: float = 10.0) -> bool:
    """Leaves the process group; never takes longer than `timeout_s` seconds, whatever the other ranks do.

    Returns False when the group could not be closed in time (a peer died inside a collective). Then the process
    should flush its files and leave with `os._exit`: an ordinary exit would wait for the same threads.
    """
    global _control
    _control = None
    if not dist.is_available() or not dist.is_initialized():
        return True
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def close() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread starts on device 0, and would create a context there
        dist.destroy_process_group()

    thread = threading.Thread(target=close, name="close-process-group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _store(rank_env: RankEnv, timeout: timedelta) -> dist.Store:
    if rank_env.master_addr is None or rank_env.master_port is None:
        return dist.HashStore()  # one rank
    address = f"tcp://{rank_env.master_addr}:{rank_env.master_port}"
    try:
        store, _, _ = next(iter(dist.rendezvous(address, rank_env.rank, rank_env.world_size, timeout=timeout)))
    except (dist.DistNetworkError, dist.DistStoreError) as problem:
        if "EADDRINUSE" in str(problem):
            raise UserError(
                f"MASTER_PORT={rank_env.master_port} is taken: another run uses it, or two processes have RANK=0"
            ) from problem
        raise UserError(
            f"not all {rank_env.world_size} ranks met at {rank_env.master_addr}:{rank_env.master_port} "
            f"within {timeout.total_seconds():.0f} s: start the missing ones, or check MASTER_ADDR and MASTER_PORT"
        ) from problem
    return store
