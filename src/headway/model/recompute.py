"""Activation recompute: keep less of the forward, run that part again in backward (arXiv:1604.06174, 2205.05198)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.account.errors import UserError
from headway.model.dropout import dropouts
from headway.model.forward import inner_model
from headway.plan.activations import Level

_aten = torch.ops.aten
# Those of the flash-attn packages are registered where these are imported.
_OPERATORS = (_aten, torch.ops.torch_attn, torch.ops.headway, torch.ops.flash_attn, torch.ops.flash_attn_3)
# Dear to compute for the bytes their outputs take. Experts' grouped products are not among them: their outputs are
# written over by the models.
_PRODUCTS = {
    op.default
    for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
    if (op := getattr(_aten, name, None)) is not None
}
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_varlen_attn",  # of torch's varlen_attn
    "packed_attention",  # ours
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
)


def _attention() -> set[Any]:
    found = [getattr(operators, name, None) for operators in _OPERATORS for name in _ATTENTION]
    return {op.default for op in found if op is not None}


def set_recompute(model: nn.Module, level: Level) -> None:
    """Sets how much every following forward pass keeps; may be repeated at any time between steps.

    ``none`` keeps everything; ``selective`` keeps the outputs of matrix products and attention and computes the rest
    again; a number n recomputes the first n decoder layers wholly and the others selectively; ``full`` recomputes every
    layer from its input; ``offload`` is that with the inputs in host memory. Gradients are bit for bit the same.

    Non-reentrant, so that the document table (a keyword argument) reaches the second forward, frozen layers keep their
    gradients, and random states are restored. UserError for a model whose layers cannot be recomputed.
    """
    inner = inner_model(model)
    layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
    if level != "none" and not (inner.supports_gradient_checkpointing and layers):
        raise UserError(f"model.recompute {level}: {type(inner).__name__} cannot recompute its layers; use none")
    known = level in ("none", "selective", "full", "offload") or (isinstance(level, int) and level > 0)
    if not known:
        raise UserError(f"model.recompute {level!r} is unknown; use auto, none, selective, full or a number of layers")
    for index, layer in enumerate(layers):
        _switch(layer, level != "none", _function(inner, _of_layer(level, index)))
    for module in inner.modules():
        # Models that call the function themselves ask this flag.
        if hasattr(module, "gradient_checkpointing") and not isinstance(module, GradientCheckpointingLayer):
            _switch(module, level != "none", _function(inner, _of_layer(level, 0)))


def _switch(module: Any, on: bool, function: Callable[..., Any]) -> None:
    module.gradient_checkpointing = on
    module._gradient_checkpointing_func = function


def _of_layer(level: Level, index: int) -> Level:
    if isinstance(level, int):
        return "full" if index < level else "selective"
    return level


def _function(model: PreTrainedModel, level: Level) -> Callable[..., Any]:
    if level == "selective":
        keep = _PRODUCTS if _has_dropout(model) else _PRODUCTS | _attention()
        return partial(checkpoint, use_reentrant=False, context_fn=partial(_contexts, frozenset(keep)))
    if level == "offload":
        return _with_inputs_on_host
    return partial(checkpoint, use_reentrant=False)


def _contexts(keep: frozenset[Any]) -> Any:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _has_dropout(model: nn.Module) -> bool:
    """Attention with dropout draws random numbers: were its output kept, whatever draws after it in the second forward
    would draw others than in the first."""
    return any(True for _ in dropouts(model))


def _with_inputs_on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Only what checkpoint keeps, the layer's inputs, passes these hooks: inside, it has hooks of its own."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False)
