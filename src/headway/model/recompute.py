"""Activation recompute: keep each layer's input, run its forward again in backward (arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from headway.account.errors import UserError
from headway.model.forward import inner_model

Recompute = Literal["none", "full"]


def set_recompute(model: nn.Module, policy: Recompute) -> None:
    """`full` recomputes every decoder layer, `none` keeps all activations. Gradients are the same; both may be
    repeated, and LoRA models are fine. UserError for a model whose layers cannot be recomputed.

    Non-reentrant, so that the document table (a keyword argument) reaches the second forward, frozen layers keep
    their gradients, and random states are restored.
    """
    inner = inner_model(model)
    if policy == "none":
        if any(getattr(module, "gradient_checkpointing", False) for module in inner.modules()):
            _renamed(inner, "disable")()
        return
    if policy != "full":
        raise UserError(f"model.recompute {policy!r} is unknown; use none or full")
    if not inner.supports_gradient_checkpointing:
        raise UserError(f"model.recompute full: {type(inner).__name__} cannot recompute its layers; use none")
    _renamed(inner, "enable")({"use_reentrant": False})


def _renamed(model: PreTrainedModel, verb: str) -> Callable[..., None]:
    """transformers calls it activation checkpointing since 5.2x, and warns about the old name."""
    new = getattr(model, f"activation_checkpointing_{verb}", None)
    return new or getattr(model, f"gradient_checkpointing_{verb}")
