"""`headway tune --precision`: how much each module errs in the narrow type, on real data; which to keep in float32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.config.run import RunConfig
from headway.model.forward import attention_of, call_arguments
from headway.model.precision import matches
from headway.prove.rebatch import documents_of
from headway.prove.trainee import Trainee
from headway.prove.verify import reference_of

#: Times the median error of its kind of module, from which a module is proposed for float32.
SENSITIVE = 4.0

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class LayerError:
    """module: dotted name; error: relative error of its output when only it is computed in the narrow type."""

    module: str
    kind: str
    error: float


@dataclass(frozen=True)
class Precision:
    """The narrow type, errors from the worst down, and the list to write under train.sensitive."""

    dtype: str
    errors: tuple[LayerError, ...]
    sensitive: tuple[str, ...]
    tokens: int


def measure_layers(config: RunConfig, scratch: Path, batches: int = 1) -> Precision:
    """Runs the float32 path over real documents and computes every leaf module a second time in the narrow type.

    The narrow type is the run's own precision; where that is float32, bfloat16. float8 rounds weights and inputs with
    one scale a tensor, as torchao does; products then are float32.
    """
    chosen = config.train.precision if config.train.precision in NARROW else "bfloat16"
    plan = documents_of(config, batches, 0)
    trainee = Trainee(reference_of(config), scratch)
    sums: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    try:
        model = trainee.module
        hooks = []
        for name, module in model.named_modules():
            if not list(module.children()) and any(True for _ in module.parameters(recurse=False)):
                kinds[name] = type(module).__name__
                hooks.append(module.register_forward_hook(_Measured(name, NARROW[chosen], sums)))
        model.eval()
        tokens = 0
        with torch.no_grad():
            for pieces in plan.pieces:
                for batch in trainee.batches(plan.view, pieces):
                    model(**call_arguments(attention_of(model), batch))
                    tokens += batch.tokens
        for hook in hooks:
            hook.remove()
    finally:
        trainee.close()
    errors = [
        LayerError(name, kinds[name], (wrong / whole) ** 0.5 if whole else 0.0) for name, (wrong, whole) in sums.items()
    ]
    errors.sort(key=lambda each: -each.error)
    return Precision(chosen, tuple(errors), proposed(errors, config.train.sensitive), tokens)


class _Measured:
    """A forward hook: the module again in the narrow type, its squared error against what was computed."""

    def __init__(self, name: str, dtype: torch.dtype, sums: dict[str, list[float]]) -> None:
        self.name, self.dtype, self.sums = name, dtype, sums
        self.busy = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.busy or not isinstance(output, Tensor):
            return
        self.busy = True  # the second call meets this hook again
        kept = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        try:
            for name, value in kept.items():
                getattr(module, name).data = rounded(value, self.dtype)
            again = module(*(rounded(a, self.dtype) if _is_real(a) else a for a in args))
        finally:
            for name, value in kept.items():
                getattr(module, name).data = value
            self.busy = False
        wrong, whole = self.sums.setdefault(self.name, [0.0, 0.0])
        difference = rounded(again, self.dtype).double() - output.double()
        self.sums[self.name] = [
            wrong + float(difference.square().sum()),
            whole + float(output.double().square().sum()),
        ]


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest values of the narrow type, as the type they came in; float8 with one scale for the tensor."""
    if dtype is not torch.float8_e4m3fn:
        return value.to(dtype).to(value.dtype)
    largest = float(value.abs().max())
    scale = torch.finfo(dtype).max / largest if largest else 1.0
    return (value * scale).to(dtype).to(value.dtype) / scale


def proposed(errors: list[LayerError], have: list[str]) -> tuple[str, ...]:
    """The patterns there are, and modules that err far more than the median of all that are not covered by them."""
    open_ones = [each for each in errors if not matches(each.module, have)]
    if not open_ones:
        return tuple(have)
    middle = sorted(each.error for each in open_ones)[len(open_ones) // 2]
    bad = [each.module for each in open_ones if each.error > SENSITIVE * middle]
    return (*have, *_grouped(bad, [each.module for each in open_ones]))


def _grouped(bad: list[str], everything: list[str]) -> Iterator[str]:
    """One pattern where every layer's module of a name is bad, each by its own name otherwise."""
    endings: dict[str, list[str]] = {}
    for name in bad:
        endings.setdefault(_ending(name), []).append(name)
    for ending, names in endings.items():
        alike = [name for name in everything if _ending(name) == ending]
        if len(alike) > 1 and len(names) == len(alike):
            yield f"*.{ending}"
        else:
            yield from sorted(names)


def _ending(name: str) -> str:
    return re.split(r"\.\d+\.", name)[-1]


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def precision_lines(found: Precision) -> Iterator[str]:
    """The worst modules, the median, and the line for the run file."""
    yield f"relative error of each module's output in {found.dtype}, against float32, over {found.tokens} tokens"
    for each in found.errors[:20]:
        yield f"  {each.error:9.2e}  {each.kind:<16} {each.module}"
    if len(found.errors) > 20:
        middle = found.errors[len(found.errors) // 2].error
        yield f"  … {len(found.errors) - 20} more, the median of all is {middle:.2e}"
    yield f"train.sensitive: [{', '.join(repr(name) for name in found.sensitive)}]"
