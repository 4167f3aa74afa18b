"""Which parts of a model run wider than the rest, and which run in 8 bits."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map

from headway.account.errors import UserError
from headway.model.forward import inner_model
from headway.model.parameters import is_norm


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module's dotted name, or any of its endings at a dot, fits one of the patterns (case-sensitive)."""
    parts = name.split(".")
    endings = [".".join(parts[at:]) for at in range(len(parts))]
    return any(fnmatch.fnmatchcase(ending, pattern) for pattern in patterns for ending in (*endings, f".{name}"))


def sensitive_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The innermost modules with parameters of their own that the patterns name, the output head left out (its loss is
    float32 whatever happens; its product runs in the compute type).

    Raises UserError for a pattern that contains no wildcard and names nothing: it is a typing error.
    """
    head = inner_model(model).get_output_embeddings()
    for pattern in unmatched(model, patterns):
        if "*" not in pattern and pattern != "lm_head":
            raise UserError(f"train.sensitive: {pattern} names no module of the model; patterns may hold *")
    return {name: module for name, module in _owners(model) if matches(name, patterns) and module is not head}


def unmatched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Those patterns that name no module with parameters of its own."""
    named = [name for name, _ in _owners(model)]
    return [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in named)]


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters of their own, by name."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name, module


def keep_wide(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Makes the sensitive modules compute in float32 inside a narrower forward pass; returns their names.

    Norms do so by themselves (transformers' widen their input, torch's are widened by autocast) and are left alone.
    Under autocast the results stay float32 (it narrows them where they meet a product); under FSDP2, which casts
    weights when it gathers them, the module computes in float32 from those and its results are cast back.
    """
    found = []
    for name, module in sensitive_modules(model, patterns).items():
        if not is_norm(module):
            module.forward = _in_float32(module)
            found.append(name)
    return found


def _in_float32(module: nn.Module) -> Callable[..., Any]:
    narrow = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = dict(module.named_parameters())
        kind = next(iter(weights.values())).device.type
        cast_back = None if torch.is_autocast_enabled(kind) else _floating_dtype(args)
        casts = {name: weight.float() for name, weight in weights.items() if weight.dtype != torch.float32}
        swapped = _reparametrize_module(module, casts) if casts else nullcontext()
        with torch.autocast(kind, enabled=False), swapped:
            result = narrow(*tree_map(_wide, args), **tree_map(_wide, kwargs))
        return result if cast_back is None else tree_map(lambda value: _to(value, cast_back), result)

    return forward


def _wide(value: Any) -> Any:
    return _to(value, torch.float32)


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _floating_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    return next((one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point()), None)


def use_float8(model: nn.Module, patterns: Sequence[str], *, emulate: bool = False) -> list[str]:
    """Replaces the layers' linear modules by torchao's float8 ones (tensorwise scales); returns their names.

    Left out: what `patterns` name, the output head, and sizes that are no multiple of 16 (the kernels' unit).
    `emulate` computes the same values without the hardware.

    Raises:
        UserError: torchao is not installed, or nothing is left to convert.
    """
    chosen = linear_to_float8(model, patterns, inner_model(model).get_output_embeddings(), emulate=emulate)
    if not chosen:
        raise UserError(
            "train.precision: float8 finds no linear layer with sizes that are multiples of 16 beside train.sensitive; "
            "use bfloat16"
        )
    return chosen


def linear_to_float8(
    module: nn.Module, patterns: Sequence[str], head: nn.Module | None = None, *, emulate: bool = False
) -> list[str]:
    """`use_float8` on any module; an empty list where nothing fits. Raises UserError without torchao."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError("train.precision: float8 needs torchao; `pip install headway[gpu]` or use bfloat16") from error
    chosen: list[str] = []

    def wanted(part: nn.Module, name: str) -> bool:
        fits = isinstance(part, nn.Linear) and not (part.in_features % 16 or part.out_features % 16)
        if not fits or part is head or matches(name, ["lm_head", *patterns]):
            return False
        chosen.append(name)
        return True

    # The weight's gradient sums over slots, whose number need be no multiple of 16 either: after a cut it rarely is.
    options = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(module, module_filter_fn=wanted, config=options)
    return chosen
