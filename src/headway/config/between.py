"""What must hold between sections, and settings that are allowed but surprising."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.base import fault
from headway.config.checkpoint import COMPARED_BESIDES
from headway.config.layers import is_within

if TYPE_CHECKING:
    from headway.config.run import RunConfig


def check_between_sections(config: RunConfig) -> None:
    """Raises a fault that names the key when sections contradict each other."""
    _global_batch_is_whole(config)
    _allows_what_is_compared(config)
    if config.train.steps is not None:
        misfit = config.schedule.misfit(config.train.steps)
        if misfit:
            raise fault(*misfit)


def _global_batch_is_whole(config: RunConfig) -> None:
    size = config.train.global_batch_tokens
    unit = config.slots_per_sequence
    if size is None or size % unit == 0:
        return
    name = "data.slots" if config.data.packed else "data.seq_len"
    below, above = size // unit * unit, (size // unit + 1) * unit
    nearest = f"{above}" if not below else f"{below} or {above}"
    raise fault(
        "train.global_batch_tokens", f"{size} is not a multiple of {name} = {unit}; the nearest that is: {nearest}"
    )


def _allows_what_is_compared(config: RunConfig) -> None:
    from headway.config.names import nearest
    from headway.config.schema import all_keys

    compared = {name for name, key in all_keys().items() if key.identity}
    for name in config.checkpoint.allow:
        inside = any(is_within(key, name) or is_within(name, key) for key in compared)
        if inside or COMPARED_BESIDES.fullmatch(name):
            continue
        if name in all_keys():
            raise fault("checkpoint.allow", f"{name} may differ anyway: no resume compares it; take it out")
        meant = nearest(name)
        near = f"; did you mean {meant}?" if meant else "; `headway train --show` lists all keys"
        raise fault("checkpoint.allow", f"{name} is no key that a resume compares{near}")


def surprises(config: RunConfig) -> list[str]:
    """One line for every setting that is valid but has no effect, or not the one that is likely meant."""
    return [*_without_effect(config), *_likely_mistakes(config)]


def _without_effect(config: RunConfig) -> list[str]:
    data, optim, schedule = config.data, config.optim, config.schedule
    found = []
    if data.packed:
        changed = {"rows": data.rows != 8, "pad_to": data.pad_to != "longest", "group_by_length": data.group_by_length}
        found += [
            f"data.{name} has no effect: documents are packed (data.pack is {data.pack}); set data.pack=none for rows"
            for name, is_changed in changed.items()
            if is_changed
        ]
    elif data.slots != data.seq_len:
        found.append("data.slots has no effect: packing is off (data.pack is none); set data.pack=best_fit for packs")
    if optim.name != "muon":
        changed = {"muon_lr": optim.muon_lr != optim.lr, "momentum": optim.momentum != 0.95}
        found += [
            f"optim.{name} has no effect: the optimizer is {optim.name}; set optim.name=muon to use it"
            for name, is_changed in changed.items()
            if is_changed
        ]
    if schedule.kind != "wsd" and schedule.decay != 0.2:
        found.append(f"schedule.decay has no effect: schedule.kind is {schedule.kind}; it belongs to wsd")
    if schedule.kind == "constant" and schedule.min_ratio != 0.0:
        found.append("schedule.min_ratio has no effect: schedule.kind is constant, so the rate never falls")
    if config.eval.batches is not None and not config.eval.enabled:
        found.append("eval.batches has no effect: neither eval.data nor eval.holdout is set, so nothing is evaluated")
    return found


def _likely_mistakes(config: RunConfig) -> list[str]:
    found = []
    if config.model.lora is not None and config.model.config is not None:
        found.append(
            "model.lora trains adapters on random frozen weights, because model.config starts from random ones; "
            "use model.path"
        )
    if config.model.dtype == "bfloat16" and config.model.lora is None:
        found.append(
            "model.dtype is bfloat16: updates smaller than about 0.4 % of a weight are rounded away; "
            "float32 with train.precision=bfloat16 keeps them"
        )
    if config.checkpoint.every is None and not config.checkpoint.at_end:
        found.append("checkpoint.every is null and checkpoint.at_end is off: the trained weights will not be saved")
    return [*found, *_idle_ranks(config)]


def _idle_ranks(config: RunConfig) -> list[str]:
    parallel = config.parallel
    if parallel.ranks is None and parallel.fsdp is None:
        return []
    ranks = parallel.local_ranks(0)
    micro = ranks * (1 if config.data.packed else config.data.rows)
    sequences = config.sequences_per_step(ranks)
    idle = -sequences % micro
    if not idle:
        return []
    unit = "packs" if config.data.packed else "rows"
    return [
        f"the global batch of {sequences} {unit} does not divide by {micro} ({ranks} ranks): {idle} of every "
        f"{sequences + idle} computed {unit} are padding"
    ]
