"""One DeviceMesh for every kind of parallelism. Today it has the two data-parallel dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.account.errors import UserError

REPLICATE, SHARD = "dp_replicate", "dp_shard"


@dataclass(frozen=True)
class Layout:
    """How many ranks each dimension has. Outer to inner, as in the mesh: replicate × shard."""

    replicate: int = 1
    shard: int = 1

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard

    @property
    def data_parallel(self) -> int:
        """Ranks that see different micro-batches of one global batch."""
        return self.replicate * self.shard


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    """The mesh over all ranks, dimensions ``dp_replicate`` and ``dp_shard``; None for a single process.

    Raises:
        UserError: the process group has another size than the layout.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != layout.world_size:
        raise UserError(
            f"parallel.replicate × parallel.fsdp = {layout.world_size}, but {world} rank(s) run; make them equal"
        )
    if world == 1:
        return None
    return init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=(REPLICATE, SHARD))
