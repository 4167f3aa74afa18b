"""`fuse: auto`: measures every operation's candidates on the model's own shapes and makes the model use the fastest."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from headway.model.head import install_loss_head, output_head, remove_loss_head, why_no_loss_head
from headway.model.kernels.attention import Kind, attention_case, attentions_of, settled, use_attention
from headway.model.kernels.cache import cache_key, cached_choice, keep_choice
from headway.model.kernels.case import Case, Choice
from headway.model.kernels.glu import gate_case, gated_mlps_of, use_gate
from headway.model.kernels.layer_norm import layer_norm_case, layer_norms_of, use_layer_norm
from headway.model.kernels.loss_case import IMPLEMENTATIONS, loss_case
from headway.model.kernels.measure import NO_MEMORY, OUT_OF_TIME, UNTRIED, choose, dtype_of
from headway.model.kernels.norm import norm_case, norms_of, use_norm
from headway.model.kernels.residual_norm import residual_case, residual_layers_of, use_residual_norm
from headway.model.kernels.rotary import rotary_attentions_of, rotary_case, use_rotary
from headway.model.kernels.whole import whole_model_differs

BUDGET = 15.0
"""Seconds that choosing may take at the start of a run, all operations together."""
DEAREST = 4.0
"""Times the other operations' share of it that attention and the head have: a fifth and a seventh of a step on an H200,
and the most candidates."""


@dataclass(frozen=True)
class Setting:
    """What the shapes follow from: slots of a micro-batch, the share of them with a label, the compute type.

    lengths: of documents as they come, enough to fill a micro-batch. cast: the type that sharding casts weights, and so
    the residual stream, to; None where both stay in the parameters' own.
    """

    slots: int
    trained_share: float
    compute_dtype: torch.dtype
    device: torch.device
    device_name: str
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    compiled: bool = False  # the layers are compiled whole, which fuses what lies between their products
    lengths: tuple[int, ...] = ()
    cast: torch.dtype | None = None


@dataclass(frozen=True)
class Chosen:
    """What the model runs by; `warnings` name candidates that were wrong, and what stays plain and why.

    update: choices outside of the model, of the optimizer and of clipping. plain: why all of the model stays plain, if
    it does. again: all of it is what the session before ran by.
    """

    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]
    seconds: float
    update: tuple[Choice, ...] = ()
    plain: str = ""
    again: bool = False

    def of_update(self, operation: str, otherwise: str) -> str:
        """What `operation` of the update runs by."""
        return next((choice.chosen for choice in self.update if choice.operation == operation), otherwise)

    def loss_head(self) -> bool:
        """Whether slots without a label are left out of the head."""
        return any(choice.operation == "linear_loss" for choice in self.choices)

    def compiles(self) -> bool:
        """Whether torch.compile is behind one of them, so that compilations are worth counting."""
        return any(choice.chosen == "compile" for choice in self.choices)

    def untried(self) -> list[str]:
        """Candidates that could not be tried in the time there was, by operation."""
        found: dict[str, list[str]] = {}
        for choice in (*self.choices, *self.update):
            for result in choice.results:
                if result.reason.startswith(UNTRIED):
                    found.setdefault(result.name, []).append(choice.operation)
        return [f"{name} of {', '.join(operations)}" for name, operations in found.items()]

    def summary(self) -> str:
        every = (*self.choices, *self.update)
        used = ", ".join(f"{choice.operation} {choice.chosen}" for choice in every) or "nothing to choose"
        if self.again:
            return f"kernels: {used} (as in the session before)"
        where = "from earlier measurements" if all(c.cached for c in every) else f"in {self.seconds:.1f} s"
        missing = "; ".join(self.untried())
        told = f"; not tried for want of time or memory: {missing} (`headway bench kernels` tries them)"
        more = told if missing else ""
        return f"kernels: {used} (chosen {where}{more})"


@dataclass(frozen=True)
class Before:
    """What the session that a run goes on from ran by: choices by operation, and why its model was plain, if it was.

    A resume repeats it unmeasured: another kernel adds up in another order, and the curves would part.
    """

    choices: Mapping[str, Choice] = field(default_factory=dict)
    plain: str = ""

    def of(self, case: Case) -> tuple[Choice | None, str]:
        """The choice for such a case; where it cannot be repeated None, and why, in words."""
        known = self.choices.get(case.operation)
        if known is None:
            return None, ""
        able = {candidate.name: candidate for candidate in case.candidates}
        if (known.shape, known.dtype) != (case.shape, dtype_of(case)):
            reason: str | None = f"was chosen for {known.shape} in {known.dtype}"
        elif known.chosen not in able:
            reason = "is not known here"
        else:
            reason = able[known.chosen].cannot()
        if reason is None:
            return known, ""
        return None, f"{case.operation}: chosen anew: {known.chosen}, as in the session before, {reason}"


NOTHING = Before()

Names = dict[str, str]
"""Operation -> the candidate that was chosen, of those measured before."""


@dataclass(frozen=True)
class _Operation:
    """case: made from the choices so far, since what is to be beaten may be one of them. share: of the time for
    choosing, against the others', by what is to be won in a step. put: makes any of such modules use a candidate."""

    name: str
    case: Callable[[Names], Case]
    use: Callable[[str], None]
    undo: Callable[[], None]
    settle: Callable[[Choice], Choice] = lambda choice: choice
    share: float = 1.0
    modules: Sequence[nn.Module] = ()
    put: Callable[[list[Any], str], None] = lambda modules, name: None


def measure_kernels(
    model: nn.Module, setting: Setting, *, budget: float = BUDGET, fresh: bool = False, before: Before = NOTHING
) -> Chosen:
    """Chooses, and changes nothing. budget: seconds for everything not known yet; fresh: measure what is known too."""
    started = time.monotonic()
    if before.plain:
        return Chosen((), (f"nothing is fused, as in the session before: {before.plain}",), 0.0, plain=before.plain)
    operations, warnings = _operations(model, setting)
    choices: dict[str, Choice] = {}
    # The dearest first, so that none of the small ones takes their time; what one leaves over is the next ones'.
    waiting = sorted(operations, key=lambda each: -each.share)
    while waiting:
        left = budget - (time.monotonic() - started)
        operation, share = waiting[0], waiting[0].share / sum(each.share for each in waiting)
        case = operation.case({name: choice.chosen for name, choice in choices.items()})
        choices[operation.name], told = again_or_measured(
            case, setting.device_name, setting.compute_dtype, left * share, operation.settle, fresh=fresh, before=before
        )
        warnings += told
        waiting = waiting[1:]
        del case
    ordered = tuple(choices[operation.name] for operation in operations)
    return Chosen(ordered, tuple(warnings), time.monotonic() - started)


def install_kernels(
    model: nn.Module,
    setting: Setting,
    chosen: Chosen,
    agree: Callable[[str | None], str | None] = lambda differs: differs,
) -> Chosen:
    """Makes the model use what was chosen (on rank 0, say); returns what it now uses.

    The whole model is compared with itself before, loss and gradients; where it differs, all of it stays plain.
    agree: from what differs on a rank to what all of them go by; without it ranks near the bound would part.
    """
    if chosen.plain:
        return chosen
    operations, _ = _operations(model, setting)
    names = {choice.operation: choice.chosen for choice in chosen.choices}

    def install() -> None:
        for operation in operations:
            operation.use(names[operation.name])

    differs = agree(whole_model_differs(model, install, setting.device, setting.compute_dtype))
    if differs is None:
        return chosen
    for operation in operations:
        operation.undo()
    return replace(chosen, choices=(), warnings=(*chosen.warnings, f"nothing is fused: {differs}"), plain=differs)


def fused_layers(model: nn.Module, setting: Setting, chosen: Chosen) -> None:
    """Puts them back."""
    names = {choice.operation: choice.chosen for choice in chosen.choices}
    for operation in _between_products(model, setting):
        if operation.name in names:
            operation.use(names[operation.name])


def plain_layers(model: nn.Module, setting: Setting) -> None:
    """Takes back what was chosen between the layers' products, for layers that are compiled whole."""
    for operation in _between_products(model, setting):
        operation.undo()


def copied_layer(block: nn.Module, model: nn.Module, setting: Setting, chosen: Chosen | None) -> nn.Module:
    """A copy of one of the model's layers with its own weights, by what was chosen between its products (None: plain).

    What stands in for a module's forward holds that module: copied as it is, it would compute the original's layer.
    """
    twin = copy.deepcopy(block)
    twins = {id(module): other for module, other in zip(block.modules(), twin.modules(), strict=True)}
    for other in twins.values():
        other.__dict__.pop("forward", None)
    names = {} if chosen is None else {choice.operation: choice.chosen for choice in chosen.choices}
    for operation in _between_products(model, setting):
        mine = [twins[id(module)] for module in operation.modules if id(module) in twins]
        operation.put(mine, names.get(operation.name, "eager"))
    return twin


def again_or_measured(
    case: Case,
    device: str,
    dtype: torch.dtype,
    budget: float,
    settle: Callable[[Choice], Choice],
    *,
    fresh: bool,
    before: Before,
) -> tuple[Choice, list[str]]:
    """What the session before ran by, where it still can, else what is known or measured; and what to warn of."""
    again, why_not = before.of(case)
    choice = again or settle(known_or_measured(case, device, dtype, budget, fresh))
    return choice, [*([why_not] if why_not else []), *wrong_ones(choice)]


def known_or_measured(case: Case, device: str, dtype: torch.dtype, budget: float, fresh: bool = False) -> Choice:
    """The choice made earlier for such a case on this device, or a new one, which is kept."""
    key = cache_key(case, device, dtype)
    known = None if fresh else cached_choice(key)
    if known is not None:
        return known
    choice = choose(case, budget)
    if not any(result.reason == OUT_OF_TIME or NO_MEMORY in result.reason for result in choice.results):
        keep_choice(key, choice)  # else the next start tries what this one could not
    return choice


def wrong_ones(choice: Choice) -> list[str]:
    """Candidates that failed their check, by name."""
    return [
        f"{choice.operation}: {result.name} is not used, it {result.reason}"
        for result in choice.results
        if result.wrong
    ]


def _operations(model: nn.Module, setting: Setting) -> tuple[list[_Operation], list[str]]:
    kinds = attentions_of(model)
    found = [_attention(kind, modules, setting, DEAREST / len(kinds)) for kind, modules in kinds.items()]
    warnings: list[str] = []
    if not setting.compiled:
        found += _between_products(model, setting)
    reason = why_no_loss_head(model)
    if reason is None:
        found.append(_loss_operation(model, setting))
    else:
        warnings.append(f"linear_loss: the logits are computed whole, because {reason}")
    return found, warnings


def _loss_operation(model: nn.Module, setting: Setting) -> _Operation:
    head = output_head(model)
    assert isinstance(head, nn.Linear)
    rows = max(1, round(setting.slots * setting.trained_share))
    modes = setting.z_loss, setting.label_smoothing
    return _Operation(
        "linear_loss",
        # Made when it is measured, and freed behind it: its weight is a head's, gigabytes for large vocabularies.
        lambda names: loss_case(head, rows, setting.compute_dtype, setting.device, *modes, setting.cast),
        lambda name: install_loss_head(model, IMPLEMENTATIONS[name]),
        lambda: remove_loss_head(model),
        share=DEAREST,
    )


def _attention(kind: Kind, modules: list[nn.Module], setting: Setting, share: float) -> _Operation:
    def case(names: Names) -> Case:
        return attention_case(kind, setting.slots, setting.lengths, setting.compute_dtype, setting.device)

    return _Operation(
        kind.name(),
        case,
        lambda name: use_attention(modules, name),
        lambda: use_attention(modules, ""),
        settled,
        share,
    )


def _between_products(model: nn.Module, setting: Setting) -> list[_Operation]:
    found = []
    slots, dtype, device = setting.slots, setting.compute_dtype, setting.device
    # Under autocast the residual stream stays in the parameters' type, and the norms with it; FSDP2 casts both.
    cast = setting.cast
    stream = cast or next(model.parameters()).dtype
    if norms := norms_of(model):
        found.append(
            _operation("rms_norm", lambda names: norm_case(norms[0], slots, stream, device, cast), norms, use_norm)
        )
    if layers := residual_layers_of(model, norms):
        found.append(
            _operation(
                "residual_norm",
                lambda names: residual_case(norms[0], names["rms_norm"], slots, stream, dtype, device, cast),
                layers,
                use_residual_norm,
            )
        )
    if plain_norms := layer_norms_of(model):
        found.append(
            _operation(
                "layer_norm",
                lambda names: layer_norm_case(plain_norms[0], slots, stream, device, cast),
                plain_norms,
                use_layer_norm,
            )
        )
    if mlps := gated_mlps_of(model):
        found.append(_operation("gated_mlp", lambda names: gate_case(mlps[0], slots, dtype, device), mlps, use_gate))
    attentions = rotary_attentions_of(model)
    if attentions and (sizes := _heads(attentions[0])):
        heads, head_dim = sizes
        found.append(
            _operation(
                "rotary",
                lambda names: rotary_case(attentions[0], heads, head_dim, slots, dtype, device),
                attentions,
                use_rotary,
            )
        )
    return found


def _operation(
    name: str, case: Callable[[Names], Case], modules: list[Any], use: Callable[[list[Any], str], None]
) -> _Operation:
    return _Operation(
        name, case, lambda chosen: use(modules, chosen), lambda: use(modules, "eager"), modules=modules, put=use
    )


def _heads(module: Any) -> tuple[tuple[int, int], int] | None:
    config = getattr(module, "config", None)
    heads, head_dim = getattr(config, "num_attention_heads", None), getattr(module, "head_dim", None)
    if heads is None or not isinstance(head_dim, int) or head_dim % 2:
        return None
    return (heads, getattr(config, "num_key_value_heads", None) or heads), head_dim
