"""From the run file and the machine to the recompute level that training starts with, estimated and then rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.account.errors import UserError
from headway.account.shape import ModelShape
from headway.config.run import RunConfig
from headway.data.batch import Batch
from headway.guard.process_group import control
from headway.model.forward import attention_of
from headway.model.head import loss_head
from headway.model.recompute import set_recompute
from headway.parallel.memory import memory_capacity
from headway.parallel.out_of_memory import is_out_of_memory
from headway.parallel.wrap import Replicas, transformer_blocks
from headway.plan.activations import (
    Estimate,
    Level,
    States,
    Work,
    estimate,
    ladder,
    least_that_fits,
    offload_cost,
    optimizer_offload_cost,
)
from headway.train.decisions import Known
from headway.train.memory import Fit, keep_random_state
from headway.train.optim import Optimizers
from headway.train.step import Learner

GIB = 2**30
# The estimate counts the eager path and errs towards more recompute: where running out of memory costs a few seconds
# and nothing else, what it says takes up to this much of the memory there is, is tried.
_TRY = 1.5
# Of what is predicted, kept free in a rehearsal: what the update and later steps take beyond the worst micro-batch.
_SPARE = 0.02
# Bytes of optimizer state per trained parameter, in units of the parameter's own width.
_STATE = {"adamw": 2.0, "muon": 1.2, "adamw8bit": 0.55}


@dataclass(frozen=True)
class Choice:
    """levels: what may be tried, the chosen one first (the first one tried, with `rehearse`: of the worst pack).
    predicted: of that one."""

    levels: list[Level]
    predicted: Estimate
    capacity: float
    optimizer_bytes: float
    rehearse: bool


def choose_level(config: RunConfig, shape: ModelShape, replicas: Replicas, shards: int, ranks_here: int) -> Choice:
    """The least level whose estimate fits on every rank (the run file's own, where it names one). Collective.

    Before a rehearsal, the least that may fit. Not where FSDP2 shards: out of memory inside a gradient's reduction ends
    the process there, so the estimate must fit.
    """
    states = _states(config, replicas, shards)
    work = _work(config, replicas)
    capacity = memory_capacity(replicas.device_type, ranks_here)
    on_device = replicas.device_type == "cuda"
    wanted = config.model.recompute
    if wanted != "auto":
        _, (predicted,) = least_that_fits(shape, work, states, capacity, [wanted], device=on_device)
        return Choice([wanted], predicted, capacity, states.optimizer, rehearse=False)
    levels = ladder(len(shape.layers), offload=config.model.offload != "none")
    if not can_recompute(replicas.module):
        levels = ["none"]
    room = capacity * (_TRY if on_device and not replicas.casts_itself else 1.0)
    chosen, estimates = least_that_fits(shape, work, states, room, levels, device=on_device)
    at = max(control().gather(levels.index(chosen)))
    predicted = estimates[at]
    # Where memory is host memory, too much of it kills the process instead of raising: a rehearsal proves nothing.
    return Choice(levels[at:], predicted, capacity, states.optimizer, rehearse=on_device)


def can_recompute(module: nn.Module) -> bool:
    try:
        set_recompute(module, "full")
    except UserError:
        return False
    set_recompute(module, "none")
    return True


def describe(
    config: RunConfig, choice: Choice, level: Level, shape: ModelShape, replicas: Replicas, shards: int
) -> list[str]:
    """What is in force (`level`) and what it is predicted to take, one fact a line."""
    work, on_device = _work(config, replicas), replicas.device_type == "cuda"
    predicted = estimate(shape, work, _states(config, replicas, shards), level, device=on_device)
    total, capacity = _in_gib(predicted.total), _in_gib(choice.capacity)
    lines = [f"recompute {level}: predicted peak {total} of {capacity} on a rank"]
    if level == "offload" or (config.model.offload != "none" and "offload" in choice.levels):
        moved, seconds = offload_cost(shape, work)
        lines.append(
            f"offload of activations {'is in force' if level == 'offload' else 'is the last level'}: "
            f"{_in_gib(moved)} a micro-batch to the host and back, predicted {seconds:.3f} s unless hidden"
        )
    if config.model.offload == "optimizer":
        trained = float(sum(p.numel() for p in replicas.module.parameters() if p.requires_grad))
        held, seconds = optimizer_offload_cost(trained, shards)
        lines.append(
            f"offload of the optimizer: {_in_gib(held)} a rank on the host, predicted {seconds:.3f} s a step more"
        )
    return lines


def _in_gib(size: float) -> str:
    """In MiB where two decimals of a GiB would show little or nothing."""
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / GIB * 1024:.1f} MiB"


def rehearse(fit: Fit, learner: Learner, config: RunConfig, vocab: int, choice: Choice) -> str:
    """Forward and backward on the worst micro-batch before the first step, at each level until one fits. Collective.

    The part of the optimizer's state that only the first step makes (none, after a resume) is stood in for. Leaves no
    gradient and the random state as it was. Returns what did not fit and what the allocator measured, in words.
    """
    device = learner.device
    to_come = max(0.0, choice.optimizer_bytes - state_bytes(learner.optimizers))
    to_come += _SPARE * (choice.predicted.total - choice.predicted.reserve)

    def attempt(parts: Sequence[Batch]) -> None:
        held = failure = None
        try:
            held = stand_in(to_come, device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = f"out of memory for {_in_gib(to_come)} of the optimizer's state and spare room"
        learner.learn(parts, batch.trained_tokens, failure=failure)
        del held

    batch = worst_batch(config, vocab).to(device)
    several = config.train.global_batch_sequences is not None or config.train.global_batch_tokens is not None
    with keep_random_state():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # Twice, where steps accumulate: the second pass finds the gradients of the first in memory.
        # A level that does not fit is what is looked for here, and no incident.
        tried: list[str] = []
        tell, fit.tell = (
            fit.tell,
            lambda evidence, action, seconds: tried.append(f"{evidence}: {action.partition(';')[0]}; "),
        )
        try:
            fit.run(attempt, [batch] * (2 if several else 1))
        finally:
            fit.tell = tell
        learner.optimizers.zero_grad()
    if device.type != "cuda":
        return f"{''.join(tried)}the worst micro-batch ran"
    allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    torch.cuda.empty_cache()
    return f"{''.join(tried)}the worst micro-batch ran: {allocated:.2f} GiB allocated, {reserved:.2f} GiB reserved"


def state_bytes(optimizers: Optimizers) -> int:
    """What this rank holds of the optimizer's state."""
    found = [value for item in optimizers.items for state in item.state.values() for value in state.values()]
    tensors = [one.to_local() if isinstance(one, DTensor) else one for one in found if isinstance(one, torch.Tensor)]
    return sum(one.numel() * one.element_size() for one in tensors)


def stand_in(size: float, device: torch.device) -> torch.Tensor:
    """Memory that is taken. On a CPU it is not: too much of it would end the process instead of raising."""
    return torch.empty(int(size) if device.type == "cuda" else 0, dtype=torch.uint8, device=device)


def worst_batch(config: RunConfig, vocab: int) -> Batch:
    """The micro-batch that needs most: full of the longest documents, every token trained."""
    data = config.data
    slots = data.slots if data.packed else data.rows * data.seq_len
    return filled(config, vocab, np.unique(np.concatenate([np.arange(0, slots, data.seq_len), [slots]])))


def typical_batch(config: RunConfig, vocab: int, lengths: Sequence[int]) -> Batch:
    """A micro-batch of documents of these lengths (of full rows where it is no pack), every token trained."""
    if not config.data.packed:
        return worst_batch(config, vocab)
    table = np.concatenate([[0], np.cumsum(lengths)])
    return filled(config, vocab, np.unique(np.minimum(np.append(table, config.data.slots), config.data.slots)))


def filled(config: RunConfig, vocab: int, table: np.ndarray) -> Batch:
    """Documents from each of the table's slots to the next."""
    data = config.data
    rows, width = (1, data.slots) if data.packed else (data.rows, data.seq_len)
    slots = rows * width
    sizes = np.diff(table)
    ids = torch.arange(slots) % vocab
    return Batch(
        input_ids=ids.view(rows, width),
        labels=ids.view(rows, width),
        position_ids=(torch.arange(slots) - torch.from_numpy(np.repeat(table[:-1], sizes))).view(rows, width),
        cu_seqlens=torch.from_numpy(table.astype(np.int32)),
        max_seqlen=int(sizes.max()),
        packed=data.packed,
        documents=np.arange(len(sizes), dtype=np.int64),
        lengths=sizes.astype(np.int64),
        tokens=slots,
        trained_tokens=slots,
    )


def _work(config: RunConfig, replicas: Replicas) -> Work:
    data = config.data
    slots = data.slots if data.packed else data.rows * data.seq_len
    scores = (data.slots if data.packed else data.seq_len) if attention_of(replicas.module) == "eager" else 0
    wide = replicas.compute_dtype.itemsize
    master = next(replicas.module.parameters()).dtype.itemsize
    return Work(
        slots=slots,
        compute_bytes=wide,
        residual_bytes=wide if replicas.casts_itself else max(wide, master),
        attention_bytes=4 if replicas.device_type == "cpu" else wide,
        score_slots=scores,
        logit_copies=2 if loss_head(replicas.module) is None else 0,
    )


def _states(config: RunConfig, replicas: Replicas, shards: int) -> States:
    parameters = list(replicas.module.parameters())
    held = sum(p.numel() * p.element_size() for p in parameters)
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    wide = replicas.compute_dtype.itemsize
    count = sum(p.numel() for p in parameters)
    if replicas.casts_itself:  # two blocks at a time, and what lies outside of them
        inside = [sum(p.numel() for p in block.parameters()) for block in transformer_blocks(replicas.module)]
        gathered = wide * (2 * max(inside, default=0) + count - sum(inside))
    else:
        gathered = wide * count if any(p.element_size() != wide for p in parameters) else 0
    state = _STATE[config.optim.name] * trained
    if config.model.offload == "optimizer":
        return States(0, 0, 0, gathered)
    return States(held / shards, trained / shards, state / shards, gathered)


Most = Callable[[int], int]


def make_fit(
    config: RunConfig, module: nn.Module, choice: Choice, tell: Callable[[str, str, float], None], parts: int = 1
) -> Fit:
    """Levels may change while training only under `auto`; a fixed level is an answer that the user gave. parts: into
    which micro-batches are cut from the first step on."""
    set_recompute(module, choice.levels[0])
    auto = config.model.recompute == "auto"
    most = (lambda mine: max(control().gather(mine))) if auto else (lambda mine: 1)
    return Fit(module, list(choice.levels), most=most, tell=tell, parts=parts if auto else 1)


def parts_record(fit: Fit, device: str, ranks: int) -> dict[str, Any]:
    """For checkpoints: cut micro-batches add up in another order, so a resume cuts them from its first step on."""
    return {"parts": {"device": device, "ranks": ranks, "parts": fit.parts}}


def parts_before(known: Known, device: str, ranks: int) -> int:
    """Into how many parts the session before cut micro-batches; 1 on another device or number of ranks, where the
    memory is another one."""
    before = known.get("parts", {})
    return int(before["parts"]) if (before.get("device"), before.get("ranks")) == (device, ranks) else 1
