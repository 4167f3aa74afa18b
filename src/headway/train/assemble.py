"""From the run file to a model that is ready to learn: proved, fused, compiled, wrapped, with its optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headway.account.errors import UserError
from headway.config.run import RunConfig
from headway.config.train import USUAL_SENSITIVE
from headway.data.batch import Batch
from headway.data.view import View
from headway.data.vocabulary import check_vocabulary
from headway.guard.process_group import control
from headway.model.isolation import prove_isolation
from headway.model.kernels.choose import Chosen, copied_layer, fused_layers, plain_layers
from headway.model.precision import keep_wide, unmatched, use_float8
from headway.parallel.mesh import build_mesh
from headway.parallel.wrap import Replicas, transformer_blocks, wrap
from headway.train import fitting
from headway.train.compiling import Decision, Length, compile_layers, decide
from headway.train.compiling import as_record as decision_record
from headway.train.data import Say
from headway.train.decisions import Known
from headway.train.float8 import Float8, decide_float8
from headway.train.float8 import as_record as float8_record
from headway.train.fusing import as_record as kernels_record
from headway.train.fusing import fuse, setting_of
from headway.train.model import BuiltModel, build_model
from headway.train.optim import Optimizers, build_optimizers
from headway.train.place import Place


@dataclass(frozen=True)
class Assembled:
    """kernels: what `model.fuse` chose, None where nothing is fused. compiled: whether the layers are, and why.
    decisions: all that was decided by measuring, for environment.json and for the run's checkpoints."""

    model: BuiltModel
    replicas: Replicas
    optimizers: Optimizers
    kernels: Chosen | None
    compiled: Decision
    float8: Float8 | None = None
    decisions: dict[str, Any] = field(default_factory=dict)

    @property
    def trained_head(self) -> bool:
        """Whether the head only sees slots with a label."""
        return self.kernels is not None and self.kernels.loss_head()

    @property
    def compiles(self) -> bool:
        return self.compiled.on or (self.kernels is not None and self.kernels.compiles())


def assemble(config: RunConfig, place: Place, view: View, steps: int, known: Known, say: Say) -> Assembled:
    """Loads, proves, fuses, compiles, wraps: in this order, because each step looks at what the one before made.

    known: decisions of the session that this one goes on from.
    """
    model = build_model(config)
    refuse_other_tokens(config, view, model)
    model.module.to(place.device.torch)
    # On the actual model, in the precision it trains in: nothing else shows a leak between documents.
    with torch.autocast(place.device.type, place.compute_dtype, enabled=place.compute_dtype != torch.float32):
        proof = prove_isolation(model.module, device=place.device.torch, packed=config.data.packed)
    say(f"isolation: {proof.summary()}")
    kernels = fuse(config, model.module, view, place.device, place.compute_dtype, say, known)
    # Only now: float8 has one scale a tensor, so a document's largest value changes how its neighbours are rounded.
    float8 = _float8(config, model, view, place, known, kernels)
    in_float8 = config.train.precision == "float8" or (float8 is not None and float8.on)
    for line in _precision(config, model.module, place, float8, in_float8):
        say(f"precision: {line}")
    compiled = _compile(config, model, view, place, steps, known, kernels, exact=not in_float8)
    if config.train.compile == "auto":
        say(compiled.line())
    if compiled.on:
        compile_layers(transformer_blocks(model.module))
    replicas = wrap(
        model.module,
        build_mesh(place.layout, place.device.type),
        place.layout,
        place.compute_dtype,
        reshard_after_forward=config.parallel.reshard_after_forward,
        unused_parameters=any(layer.mlp is not None and layer.mlp.experts for layer in model.shape.layers),
        offload_optimizer=config.model.offload == "optimizer",
    )
    adamw = "fused" if kernels is None else kernels.of_update("optimizer", "fused")
    optimizers = build_optimizers(model.module, config.optim, adamw)
    if place.device.type == "cuda" and not optimizers.skips_on_device:
        say(f"optimizer: {config.optim.name} cannot skip a step on the device; the host waits for it once a step")
    device = place.device.name
    decisions = {
        **({} if kernels is None else {"kernels": {**kernels_record(kernels), "device": device}}),
        **(decision_record(compiled, device) if config.train.compile == "auto" else {}),
        **float8_record(float8, device),
    }
    return Assembled(model, replicas, optimizers, kernels, compiled, float8, decisions)


def refuse_other_tokens(config: RunConfig, view: View, model: BuiltModel) -> None:
    """Refuses token ids that the model has no row for. Collective: where tokens are read for it, one rank reads."""
    found = config.shards / "largest_tokens.json"
    control().on_main(lambda: check_vocabulary(view, model.shape.vocab, found), UserError, (UserError, OSError))


def _compile(
    config: RunConfig,
    model: BuiltModel,
    view: View,
    place: Place,
    steps: int,
    known: Known,
    kernels: Chosen | None,
    *,
    exact: bool,
) -> Decision:
    """Whether the layers are compiled; where they are, nothing is fused between their products."""
    if config.train.compile != "auto":
        return Decision(config.train.compile, "the run file says so")
    setting = setting_of(config, view, place.device, place.compute_dtype)

    def plain() -> None:
        plain_layers(model.module, setting)

    def fused() -> None:
        if kernels is not None:
            fused_layers(model.module, setting, kernels)

    ranks = place.layout.data_parallel
    sequences = config.sequences_per_step(ranks) // ranks
    length = Length(steps, max(1, sequences if config.data.packed else sequences // config.data.rows))
    batch = fitting.typical_batch(config, model.shape.vocab, setting.lengths).to(place.device.torch)
    decision = decide(
        model.module, batch, length, place.compute_dtype, known, place.device.name,
        exact=exact, plain=plain, fused=fused,
    )  # fmt: skip
    if decision.on:
        plain()
    return decision


def _float8(
    config: RunConfig, model: BuiltModel, view: View, place: Place, known: Known, kernels: Chosen | None
) -> Float8 | None:
    """What `float8_auto` decides, None where the run file decides."""
    if config.train.precision != "float8_auto":
        return None
    setting = setting_of(config, view, place.device, place.compute_dtype)

    def batch() -> Batch:
        return fitting.typical_batch(config, model.shape.vocab, setting.lengths).to(place.device.torch)

    def copied(block: nn.Module) -> nn.Module:
        # It is compiled unless the run file says no, which replaces the kernels between its products.
        return copied_layer(block, model.module, setting, kernels if config.train.compile is False else None)

    return decide_float8(config, model.module, batch, place.device, known, copied)


def _precision(config: RunConfig, module: nn.Module, place: Place, float8: Float8 | None, in_float8: bool) -> list[str]:
    """Sets what runs wider or narrower than the compute dtype; says so."""
    lines = [] if float8 is None else [float8.line()]
    if in_float8:
        if config.model.lora is not None:
            raise UserError("train.precision: float8 trains whole weights; with model.lora use bfloat16")
        converted = use_float8(module, config.train.sensitive, emulate=place.device.type == "cpu")
        how = ", emulated (no gain on a CPU)" if place.device.type == "cpu" else ""
        lines.append(f"{len(converted)} linear layers run in float8{how}, the rest in bfloat16")
    if place.compute_dtype != torch.float32:
        wide = keep_wide(module, config.train.sensitive)
        lines += [f"{len(wide)} modules computed in float32 by train.sensitive: {wide[0]} …"] if wide else []
    if in_float8 or place.compute_dtype != torch.float32:
        idle = [one for one in unmatched(module, config.train.sensitive) if one not in USUAL_SENSITIVE]
        lines += [f"train.sensitive: {', '.join(idle)} names no module: it protects nothing"] if idle else []
    return lines
