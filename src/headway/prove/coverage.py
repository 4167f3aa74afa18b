"""What a comparison does not cover: keys that neither side's steps depend on here, how large a step is, and trainings
that cannot be held against each other because other tensors are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from headway.account.errors import UserError
from headway.config.diff import Change, config_diff, flatten, without_effect
from headway.config.dump import as_plain
from headway.config.layers import is_within
from headway.config.run import RunConfig
from headway.model.load import read_config
from headway.model.lora import apply_lora

#: Keys that decide what both sides compute from the same documents. The documents of a step are always A's, so neither
#: the size of a step nor the order of documents is among them, nor the schedule: both train at the full rate.
COVERED = (
    "version", "preset", "device", "deterministic", "model", "optim", "data.chat_template",
    "data.pack", "data.slots", "data.rows", "data.pad_to", "data.group_by_length",
    "train.loss", "train.precision", "train.sensitive", "train.compile",
)  # fmt: skip
LEFT_OUT = ("model.offload", "model.lora.dropout")
STEP = ("train.global_batch_tokens", "train.global_batch_sequences")

ALIKE = 1.25
"""How many times as many tokens a step of packs may hold as one of rows, or the reverse: packs hold whole documents."""


def uncompared(a: RunConfig, b: RunConfig) -> list[Change]:
    """Keys that differ and that no step of the comparison depends on, in the order of the reference."""
    return [change for change in config_diff(a, b) if not _covered(change.key)]


def of_meaning(changes: Sequence[Change], a: RunConfig, b: RunConfig) -> list[Change]:
    """Those that make another training of it. The size of a step is not among them: `other_step` judges that."""
    silent = without_effect(flatten(as_plain(a)), flatten(as_plain(b)))
    return [change for change in changes if change.identity and change.key not in (*STEP, *silent)]


def _covered(key: str) -> bool:
    if any(is_within(key, left) for left in LEFT_OUT):
        return False
    if is_within(key, "model.config") and "drop" in key:  # dropout is off on both sides
        return False
    return any(is_within(key, one) for one in COVERED)


def other_step(a: RunConfig, b: RunConfig, tokens: tuple[float, float]) -> str:
    """How a step of B's own run is larger or smaller than one of A's, in words; empty where it is not.

    Packs against packs and rows against rows are counted: `headway tune` puts the same slots into fewer packs. Of rows
    and packs, a mean step of each holds as many `tokens`, within `ALIKE`.
    """
    left, right = tokens
    packs_and_rows = a.data.packed != b.data.packed
    if max(left, right) <= ALIKE * min(left, right) if packs_and_rows else _size(a) == _size(b):
        return ""
    return (
        f"in its own run a step of A is {_in_words(a)} with {left:,.0f} tokens on the mean, of B {_in_words(b)} with "
        f"{right:,.0f}"
    )


def _sequences(config: RunConfig) -> int:
    return config.sequences_per_step(config.parallel.local_ranks(0))


def _size(config: RunConfig) -> int:
    """Slots of a step of packs; documents of one of rows, as a row is one document whatever its length."""
    return _sequences(config) * (config.data.slots if config.data.packed else 1)


def _in_words(config: RunConfig) -> str:
    count = _sequences(config)
    return f"{count} packs of {config.data.slots} slots" if config.data.packed else f"{count} documents"


def refuse_other_tensors(a: RunConfig, b: RunConfig) -> None:
    """Raises UserError where the two train tensors of other names or shapes, from the models' configurations alone."""
    same = (a.model.path, a.model.config, a.model.lora) == (b.model.path, b.model.config, b.model.lora)
    if not same:
        refuse_tensors_apart(trained_tensors(a), trained_tensors(b))


def refuse_tensors_apart(a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless both sides train tensors of the same names and shapes."""
    apart = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    if apart:
        name = next((one for one in apart if one in a and one in b), apart[0])
        what = " and ".join(
            f"{side} {'none' if shape is None else f'one of {list(shape)}'}"
            for side, shape in (("A trains", a.get(name)), ("B", b.get(name)))
        )
        raise UserError(
            f"verify: {len(apart)} trained tensors differ in name or shape, e.g. {name}: {what}; other tensors are "
            "another training, and nothing is compared"
        )


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter that is trained, by its full name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters() if parameter.requires_grad}


def trained_tensors(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the configuration trains; no weight is read or made."""
    source = config.model.path if config.model.path is not None else config.model.config
    assert source is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            read_config(source, trust_remote_code=config.model.trust_remote_code),
            trust_remote_code=config.model.trust_remote_code,
        )
        if config.model.lora is not None:
            model = apply_lora(model, config.model.lora)
    return shapes_of(model)
