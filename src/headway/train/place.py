"""Where one rank runs: its device, its place among the ranks, the type it computes in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway.account.measured_peaks import MeasuredPeaks
from headway.account.peaks import Peak, resolve_peak
from headway.config.run import RunConfig
from headway.guard.process_group import init_process_group
from headway.guard.ranks import RankEnv, restart_of
from headway.parallel.device import Device, choose_device
from headway.parallel.mesh import Layout
from headway.train.fusing import compute_dtype
from headway.train.model import use_deterministic_kernels

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Place:
    """This rank's device and place among the ranks."""

    device: Device
    layout: Layout
    rank: int
    compute_dtype: torch.dtype
    ranks_here: int = 1

    @property
    def dtype_name(self) -> str:
        return _DTYPE_NAMES[self.compute_dtype]

    @property
    def world(self) -> int:
        return self.layout.world_size


def find_place(config: RunConfig, rank_env: RankEnv | None) -> Place:
    """Joins the process group. Collective."""
    device = choose_device(config.device, rank_env.local_rank if rank_env else 0)
    init_process_group(rank_env, device.torch, restart=restart_of(os.environ))
    if config.deterministic:
        use_deterministic_kernels()
    world = rank_env.world_size if rank_env else 1
    replicate, shard = config.parallel.dims(world)
    dtype = compute_dtype(config.train.precision, device.type)
    rank, here = (rank_env.rank, rank_env.local_world_size) if rank_env else (0, 1)
    return Place(device, Layout(replicate, shard), rank, dtype, here)


def peak_of(config: RunConfig, place: Place, say: Callable[[str], None]) -> Peak:
    """The peak that MFU is measured against. Measured peaks that cannot be read are said, and end no training."""
    measured, problem = MeasuredPeaks.usable()
    peak = resolve_peak(
        place.device.name,
        place.dtype_name,
        override=config.hardware.peak_flops,
        threads=place.device.threads or None,
        measured=measured,
    )
    if problem:
        say(f"warning: {problem}; going on without it: {peak.line()}")
    return peak
