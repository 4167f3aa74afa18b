"""Out of memory on one rank: that rank still takes part in every collective of the micro-batch, with zeros.

A rank that left a forward or backward pass in the middle would leave the others waiting in their next collective. So it
frees what it holds and walks through the collectives that are left, in the order in which the others issue them; then
all ranks agree on what comes next and throw the step's gradients away. No process group is aborted, nothing hangs, and
the healthy ranks lose one micro-batch's time.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from headway.parallel.wrap import Replicas, transformer_blocks

_IN_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
# Where a collective's own buffers are made: which ranks have issued it cannot be told any more.
_TOO_LATE = ("foreach_reduce", "post_backward")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device and in any of the libraries' words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _IN_WORDS)


def can_be_finished(error: BaseException) -> bool:
    """False where the failure lies inside a gradient's reduction: then the process must end, and its launcher all."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_name in _TOO_LATE:
            return False
        at = at.tb_next
    return True


class Collectives:
    """Finishes the collectives of a micro-batch that failed on this rank. Made after wrapping, once a model."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._blocks = transformer_blocks(replicas.module)
        self._begun = self._forward_done = False
        self._reduced: set[int] = set()
        call = replicas.call
        if isinstance(call, DistributedDataParallel):
            call.module.register_forward_pre_hook(self._note_begun)
            call.register_forward_hook(self._note_forward)
            for parameter in call.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_reduced)

    def begin(self) -> None:
        """Before each micro-batch."""
        self._begun = self._forward_done = False
        self._reduced.clear()

    def finish(self) -> None:
        """After a failure in forward or backward (or before forward): all collectives of this micro-batch are issued.

        Leaves gradients that mean nothing. The failed pass's graph must be gone (no reference to loss or logits).
        """
        free_memory(self._replicas.device_type)
        call = self._replicas.call
        if isinstance(call, FSDPModule):
            self._finish_sharded(call)
        elif isinstance(call, DistributedDataParallel):
            self._finish_replicated(call)

    def _note_begun(self, *_: object) -> None:
        self._begun = True

    def _note_forward(self, *_: object) -> None:
        self._forward_done = True

    def _note_reduced(self, parameter: Tensor) -> None:
        self._reduced.add(id(parameter))

    def _finish_replicated(self, call: DistributedDataParallel) -> None:
        """DDP reduces its buckets as gradients arrive: zeros for every parameter that has not had one in this pass."""
        if not self._begun:
            call._pre_forward()  # broadcasts the buffers
        missing = [p for p in call.parameters() if p.requires_grad and id(p) not in self._reduced]
        zero = _Zeros.apply(*missing) if missing else None
        if not self._forward_done:
            call._post_forward(zero)  # arms the reducer for this pass
        if zero is not None and call.require_backward_grad_sync:
            zero.backward()

    def _finish_sharded(self, call: FSDPModule) -> None:
        """FSDP2 gathers each block's weights in forward and in backward and scatters its gradients behind it."""
        root: Any = call._get_fsdp_state()
        root._lazy_init()
        whole = _group(root)
        blocks = [_group(block._get_fsdp_state()) for block in self._blocks]  # type: ignore[operator]
        if not _backward_has_begun(root, blocks):
            _finish_forward(whole, blocks)
            if whole._training_state.name != "PRE_BACKWARD":
                whole.pre_backward(True)
        _finish_backward(blocks)
        _zero_missing(whole)
        root._root_post_backward_final_callback()
        root._state_ctx.iter_forward_root = None


def _finish_forward(whole: Any, blocks: list[Any]) -> None:
    """Gathers what has not been gathered yet, in forward order; a group that was through has noted its place."""
    if not whole._post_forward_indices and not _gathered(whole, "FORWARD"):
        whole.pre_forward(None, (), {})
    for group in blocks:
        if group._post_forward_indices:
            continue
        if not _gathered(group, "FORWARD"):
            group.pre_forward(None, (), {})
        group.post_forward(None, (), None)
    if not whole._post_forward_indices:
        whole.post_forward(None, (), None)


def _finish_backward(blocks: list[Any]) -> None:
    for at in reversed(range(len(blocks))):
        group = blocks[at]
        if group._training_state.name == "POST_BACKWARD":
            continue
        if not _gathered(group, "PRE_BACKWARD"):
            group.pre_backward(True)
        if at:
            # The others asked for the next block's weights before they reduced this one's gradients.
            before = blocks[at - 1]
            with before.use_training_state(group._training_state):
                before.unshard(before.unshard_async_op)
        _zero_missing(group)
        group.post_backward()


def _gathered(group: Any, state: str) -> bool:
    return group._training_state.name == state and group.is_unsharded


def _group(state: Any) -> Any:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    (group,) = groups
    return group


def _backward_has_begun(root: Any, groups: list[Any]) -> bool:
    return root._state_ctx.post_backward_final_callback_queued or any(
        group._training_state.name in ("PRE_BACKWARD", "POST_BACKWARD") for group in groups
    )


def _zero_missing(group: Any) -> None:
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None or not whole.requires_grad:
            continue
        if whole.grad is None and parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)


class _Zeros(torch.autograd.Function):
    """A scalar zero whose gradient to every input is zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def free_memory(device_type: str) -> None:
    """Drops what only dead graphs hold, and gives cached blocks back so that they can be cut anew."""
    gc.collect()
    if device_type == "cuda":
        torch.cuda.empty_cache()
