"""Whose gradient is not finite: looked at on every rank before it is summed with the others', where names are lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


class BrokenGradients:
    """One flag on the device, read with the step's figures: a sum over each bucket, no wait, no further communication.

    Gradients are as they were: DDP's hook divides and sums as DDP does by itself.
    """

    def __init__(self, call: nn.Module, device: torch.device) -> None:
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        if isinstance(call, DistributedDataParallel):
            # A lambda, because DDP refuses a hook whose annotations it does not know.
            call.register_comm_hook(call.process_group, lambda group, bucket: self._sum_bucket(group, bucket))
        elif isinstance(call, FSDPModule):
            reduce_scatter = _watching(self)
            for module in call.modules():
                if isinstance(module, FSDPModule) and reduce_scatter is not None:
                    module.set_custom_reduce_scatter(reduce_scatter)

    def _sum_bucket(self, group: Any, bucket: Any) -> Any:
        self.look(bucket.buffer())
        return allreduce_hook(group, bucket)

    def look(self, gradients: Tensor) -> None:
        self._flag.logical_or_(~torch.isfinite(gradients.sum()))

    def take(self) -> Tensor:
        """Boolean scalar: any of this rank's own gradients was not finite since the last call."""
        found = self._flag.clone()
        self.forget()
        return found

    def forget(self) -> None:
        self._flag.zero_()


def _watching(watch: BrokenGradients) -> Any:
    """FSDP's own reduce-scatter with a look at what goes in; None where this torch keeps it elsewhere (then the rank is
    not named, and everything else is as ever)."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    except ImportError:
        return None

    class Watching(DefaultReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
            watch.look(input_tensor)
            return super().__call__(output_tensor, input_tensor, *rest, **options)

    return Watching()
