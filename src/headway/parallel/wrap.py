"""A model over the data-parallel ranks: FSDP2 where parameters are sharded, DDP where they are only replicated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from headway.account.errors import UserError
from headway.parallel.mesh import REPLICATE, SHARD, Layout


@dataclass(frozen=True)
class Replicas:
    """A wrapped model. `call` is what the forward pass calls, `module` the model itself (parameters may be DTensors).

    `device` is the one that computes and that batches lie on; offloaded parameters lie on the host's.

    Both FSDP2 and DDP average gradients over the ranks, so a loss that is already divided by the global number of
    trained tokens must be multiplied by `size` first.
    """

    call: nn.Module
    module: nn.Module
    size: int
    compute_dtype: torch.dtype
    device: torch.device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def casts_itself(self) -> bool:
        """Whether FSDP2 casts weights and inputs to the compute dtype, so that nothing needs autocast."""
        return isinstance(self.call, FSDPModule)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward: gradients travel only with the last one."""
        if isinstance(self.call, FSDPModule):
            self.call.set_requires_gradient_sync(last)
            self.call.set_is_last_backward(last)
        with self.call.no_sync() if isinstance(self.call, DistributedDataParallel) and not last else nullcontext():
            yield

    def autocast(self) -> AbstractContextManager[object]:
        """Lower precision for the forward pass, where no FSDP policy casts already."""
        if self.casts_itself or self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute_dtype)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sums a small tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


def wrap(
    module: nn.Module,
    mesh: DeviceMesh | None,
    layout: Layout,
    compute_dtype: torch.dtype,
    *,
    reshard_after_forward: bool = True,
    unused_parameters: bool = False,
    offload_optimizer: bool = False,
) -> Replicas:
    """Wraps a model that lies on its device.

    Args:
        module: a Hugging Face causal LM, or a PEFT model around one.
        mesh: from :func:`build_mesh`; None runs the module as it is.
        compute_dtype: dtype of the forward and backward pass; parameters keep their own, gradients are reduced in fp32.
        unused_parameters: a step may leave parameters without gradient (experts that saw no token); without this, DDP
            would wait for them for ever.
        offload_optimizer: weights, gradients and optimizer state stay in host memory (FSDP2's CPUOffloadPolicy).

    Raises:
        UserError: the optimizer is to be offloaded, and nothing is sharded.
    """
    if offload_optimizer and (mesh is None or layout.shard == 1):
        raise UserError("model.offload: optimizer is done by FSDP2; set parallel.fsdp to 2 or more")
    device = next(module.parameters()).device
    call: nn.Module = module
    if mesh is not None and layout.shard > 1:
        # On a CPU everything is in host memory already.
        offload = CPUOffloadPolicy() if offload_optimizer and device.type == "cuda" else OffloadPolicy()
        _shard(module, mesh, layout, compute_dtype, reshard_after_forward, offload)
    elif mesh is not None:
        call = DistributedDataParallel(
            module,
            process_group=mesh.get_group(REPLICATE),
            gradient_as_bucket_view=True,
            # Else DDP rebuilds its buckets after its first backward pass, and a sum over three ranks or more depends on
            # where in a bucket it lies: a resumed run would differ in its first step's last bits.
            find_unused_parameters=unused_parameters or layout.data_parallel > 2,
        )
    return Replicas(call, module, layout.data_parallel, compute_dtype, device)


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    offload: OffloadPolicy,
) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    where = mesh if layout.replicate > 1 else mesh[SHARD]
    for block in transformer_blocks(module):
        fully_shard(
            block,
            mesh=where,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
        )
    fully_shard(module, mesh=where, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of a causal LM: the items of its longest ModuleList that is not inside another one."""
    lists = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    outer = [(n, c) for n, c in lists if not any(n.startswith(other + ".") for other, _ in lists if other != n)]
    return list(max((child for _, child in outer), key=len, default=[]))
