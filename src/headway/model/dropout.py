"""Where a model draws random numbers: dropout modules, and probabilities that a layer hands to a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_NAMES = ("dropout", "dropout_prob", "pdrop", "layerdrop")
"""Ends of the names under which layers of transformers keep a probability (Llama's attention_dropout, Starcoder 2's
residual_dropout)."""


def dropouts(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """(module, attribute) of every probability above zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                yield module, "p"
            continue
        for name, value in vars(module).items():
            if name.endswith(_NAMES) and isinstance(value, int | float) and value > 0:
                yield module, name


def silence(model: nn.Module) -> None:
    """Sets them all to zero."""
    for module, name in list(dropouts(model)):
        setattr(module, name, 0.0)
