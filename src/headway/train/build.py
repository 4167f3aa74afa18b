"""Assembles a run on one rank, in order: device, ranks, data, model, wrapping, state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from headway.account.errors import UserError
from headway.account.events import Observer, SessionStart
from headway.account.flops import describe
from headway.account.measured_peaks import MeasuredPeaks
from headway.account.peaks import Peak, resolve_peak
from headway.account.run_clock import RunClock
from headway.account.totals import Totals
from headway.config.dump import dump_yaml
from headway.config.run import RunConfig
from headway.data.feed import Feeder
from headway.data.options import Progress
from headway.data.stream import Stream
from headway.data.view import View
from headway.data.vocabulary import check_vocabulary
from headway.guard.beacon import Beacon, watch_compilation
from headway.guard.checkpoint import CheckpointStore
from headway.guard.environment import collect_environment
from headway.guard.folder_lock import FolderLock
from headway.guard.ledger import Ledger
from headway.guard.process_group import control, init_process_group
from headway.guard.quarantine import Quarantine, read_ledger
from headway.guard.ranks import RankEnv, restart_of
from headway.guard.signals import StopRequest
from headway.guard.tiers import Tiers
from headway.model.isolation import prove_isolation
from headway.model.kernels.choose import Chosen, fused_layers, plain_layers
from headway.model.precision import keep_wide, use_float8
from headway.parallel.device import Device, choose_device
from headway.parallel.mesh import Layout, build_mesh
from headway.parallel.wrap import Replicas, transformer_blocks, wrap
from headway.record.files import write_atomic, write_json
from headway.record.folder import RunFolder
from headway.record.jsonl import JsonlWriter
from headway.train import fitting
from headway.train import resume as resuming
from headway.train.agreement import first_failure
from headway.train.cadence import Cadence
from headway.train.clock import StepClock
from headway.train.compiling import Decision, Length, compile_layers, decide
from headway.train.compiling import as_record as decision_record
from headway.train.data import Say, decoder, evaluation_view, make_stream, prepare_sources, total_steps, training_view
from headway.train.evaluate import Evaluator
from headway.train.export import export_live
from headway.train.flop_counter import FlopCounter
from headway.train.fusing import as_record, compute_dtype, fuse, setting_of
from headway.train.hook import HookFactory, HookPlace
from headway.train.loss_scale import LossScale
from headway.train.memory import Fit
from headway.train.model import BuiltModel, build_model, check_model_section, use_deterministic_kernels
from headway.train.optim import Optimizers, build_optimizers
from headway.train.places import describe as describe_places
from headway.train.reporter import Reporter
from headway.train.rollback import Went, go_back
from headway.train.run import Run
from headway.train.saves import Saves, every_of
from headway.train.schedule import Schedule
from headway.train.spikes import Spikes
from headway.train.step import Learner
from headway.train.supply import Supply

_LOCK_PATIENCE_S = 60.0
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Place:
    """This rank's device and place among the ranks."""

    device: Device
    layout: Layout
    rank: int
    compute_dtype: torch.dtype
    ranks_here: int = 1

    @property
    def world(self) -> int:
        return self.layout.world_size


def build_run(
    config: RunConfig,
    rank_env: RankEnv | None,
    run_clock: RunClock,
    observers: Callable[[], Sequence[Observer]],
    say: Say,
    hook: HookFactory | None = None,
    beacon: Beacon | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Builds one rank's run. Collective: every rank calls it, and it succeeds or fails on all.

    Raises:
        UserError: anything wrong with the run file, the data, the model, the machine or the checkpoint.
    """
    lock = FolderLock(config.folder)
    try:
        with run_clock.phase("startup.launch"):
            return _build(config, rank_env, run_clock, observers, say, lock, hook, beacon, progress)
    except BaseException:
        lock.release()
        raise


def _build(
    config: RunConfig,
    rank_env: RankEnv | None,
    run_clock: RunClock,
    observers: Callable[[], Sequence[Observer]],
    say: Say,
    lock: FolderLock,
    hook: HookFactory | None,
    beacon: Beacon | None,
    progress: Callable[[Progress], None] | None,
) -> Run:
    place = _find_place(config, rank_env)
    folder = RunFolder(config.folder).create()
    if folder.final_model.is_file() or config.folder.resolve() == config.shards.resolve():
        raise UserError(f"{folder.root}: the run folder holds other things under our names; set another name")
    check_model_section(config)
    # After a restart the dead rank's machine may not have let go yet.
    patience = _LOCK_PATIENCE_S if restart_of(os.environ) else 0.0
    control().on_main(lambda: lock.acquire(patience), UserError, (UserError, OSError))
    remote = resuming.remote_place(config)
    store = CheckpointStore(folder.checkpoints, resuming.run_id(folder, remote))
    control().on_main(store.sweep, UserError, (OSError,))
    tiers = Tiers(
        store,
        folder.root,
        keep_memory=config.checkpoint.keep_memory,
        device_type=place.device.type,
        timeout_s=config.checkpoint.timeout_s,
        remote=remote,
    )
    found = resuming.find_checkpoint(config, tiers)
    with run_clock.phase("startup.data"):
        told = rank_env is not None and rank_env.launched_by == "headway"  # the launcher prepared, and said so
        view, stream = _data(config, place, say, (lambda text: None) if told else say, progress)
        steps = total_steps(config, stream)
        _check_schedule(config, steps)
        resuming.refuse_early(config, stream, found)
    with run_clock.phase("startup.model"):
        model, replicas, optimizers, kernels, compiled = _model(config, place, view, steps, folder, say)
    identity = resuming.run_identity(config, stream, model.config.to_dict(), model.base_digest)
    with run_clock.phase("startup.model" if found is None else "downtime.reload"):
        # Dropout must differ between ranks; a resume then restores each rank's own generators.
        torch.manual_seed(config.seed + place.rank)
        state = resuming.resume(config, found, replicas, optimizers, identity)
    for note in state.notes:
        say(note)
    evaluator = _evaluator(config, view, place, model.shape.vocab)
    peak = _peak(config, place)
    session = resuming.next_session(folder)
    clock = StepClock(place.device.type)
    clock.watch = beacon
    _write_down(config, folder, place, kernels, compiled, peak)
    reporter = Reporter(
        session=session,
        rank=place.rank,
        clock=clock,
        run_clock=run_clock,
        totals=state.totals or Totals(),
        session_totals=Totals(),
        observers=observers(),
        rank_file=JsonlWriter(folder.rank(place.rank)),
        ledger=Ledger(folder.incidents, rank=place.rank),
        peak_flops=peak.flops * place.world if peak.flops else None,
        compiled=compiled.on or (kernels is not None and kernels.compiles()),
    )
    if beacon is not None and reporter.compiled:
        watch_compilation(beacon)
    learner = _learner(config, replicas, optimizers, clock, place, state, tiers.fence)
    learner.clipping = "foreach" if kernels is None else kernels.of_update("clipping", "foreach")
    with run_clock.phase("compile"):
        fit, facts, optimizer_bytes = _fit(config, learner, model, place, reporter, state.step, say)
    failures, device_s = resuming.failures_so_far(folder)
    cadence = Cadence(every_of(config.checkpoint), place.world, failures, device_s, control(), say)
    saves = Saves(config.checkpoint, tiers, reporter, say, cadence, lambda: run_clock.account().wall_ns / 1e9)
    reporter.on_step = saves.step
    if found is not None:
        for reason in found.ref.rejected:
            action = f"went on from step {state.step} ({found.tier})"
            reporter.incident("checkpoint rejected", state.step, reason, action)
    kept = [p for p in model.module.parameters() if p.requires_grad or config.model.lora is None]
    saved = sum(p.numel() * p.element_size() for p in kept)
    for line in describe_places(config.checkpoint, tiers, saved, optimizer_bytes * place.layout.shard, place.world):
        say(f"checkpoints: {line}")
    spikes = _spikes(config, learner, fit, stream, folder, place, reporter, tiers, state, say)
    return Run(
        config=config,
        session_start=_session_start(reporter, state, place, steps, peak, model, stream, facts, kernels),
        total_steps=steps,
        learner=learner,
        fit=fit,
        schedule=_schedule(config, steps),
        supply=Supply(
            lambda position: Feeder(
                spikes.stream,
                position,
                place.rank,
                place.world,
                place.device.torch,
                depth=config.data.prefetch,
                process=config.data.loader == "process",
            ),
            state.position,
            reporter.local_incident,
        ),
        spikes=spikes,
        counter=FlopCounter(model.shape, model.trainable, place.world, _trained_head(kernels)),
        reporter=reporter,
        run_clock=run_clock,
        saves=saves,
        lock=lock,
        # Last: until here a signal ends the process at once, since there is nothing to save.
        stop=StopRequest(),
        identity=identity,
        export=lambda: export_live(config, model, folder.final_model),
        exported=folder.final_model,
        evaluator=evaluator,
        hook=hook(HookPlace(folder.root, place.rank, place.world, session, clock)) if hook else None,
        beacon=beacon,
        shards=place.layout.shard,
        step=state.step,
        position=state.position,
        saved_step=state.step if found is None or found.tier == "disk" else -1,
    )


def _find_place(config: RunConfig, rank_env: RankEnv | None) -> Place:
    device = choose_device(config.device, rank_env.local_rank if rank_env else 0)
    init_process_group(rank_env, device.torch, restart=restart_of(os.environ))
    if config.deterministic:
        use_deterministic_kernels()
    world = rank_env.world_size if rank_env else 1
    replicate, shard = config.parallel.dims(world)
    dtype = compute_dtype(config.train.precision, device.type)
    rank, here = (rank_env.rank, rank_env.local_world_size) if rank_env else (0, 1)
    return Place(device, Layout(replicate, shard), rank, dtype, here)


def _data(
    config: RunConfig, place: Place, say: Say, say_prepared: Say, progress: Callable[[Progress], None] | None
) -> tuple[View, Stream]:
    control().on_main(lambda: prepare_sources(config, say_prepared, progress), UserError, (UserError, OSError))
    view = training_view(config)
    stream = make_stream(config, view, config.sequences_per_step(place.layout.data_parallel))
    for fact in (view.overlong, view.untrained, stream.efficiency(0)):
        say(f"data: {fact}")
    return view, stream


def _model(
    config: RunConfig, place: Place, view: View, steps: int, folder: RunFolder, say: Say
) -> tuple[BuiltModel, Replicas, Optimizers, Chosen | None, Decision]:
    model = build_model(config)
    check_vocabulary(view, model.shape.vocab)
    model.module.to(place.device.torch)
    # On the actual model, in the precision it trains in: nothing else shows a leak between documents.
    with torch.autocast(place.device.type, place.compute_dtype, enabled=place.compute_dtype != torch.float32):
        proof = prove_isolation(model.module, device=place.device.torch, packed=config.data.packed)
    say(f"isolation: {proof.summary()}")
    kernels = fuse(config, model.module, view, place.device, place.compute_dtype, say)
    # Only now: float8 has one scale a tensor, so a document's largest value changes how its neighbours are rounded.
    for line in _precision(config, model.module, place):
        say(f"precision: {line}")
    compiled = _compile(config, model, view, place, steps, folder, kernels)
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
    return model, replicas, optimizers, kernels, compiled


def _compile(
    config: RunConfig,
    model: BuiltModel,
    view: View,
    place: Place,
    steps: int,
    folder: RunFolder,
    kernels: Chosen | None,
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
    exact = config.train.precision != "float8"
    decision = decide(
        model.module, batch, length, place.compute_dtype, folder.environment, place.device.name,
        exact=exact, plain=plain, fused=fused,
    )  # fmt: skip
    if decision.on:
        plain()
    return decision


def _trained_head(kernels: Chosen | None) -> bool:
    return kernels is not None and kernels.loss_head()


def _precision(config: RunConfig, module: nn.Module, place: Place) -> list[str]:
    """Sets what runs wider or narrower than the compute dtype; says so."""
    lines = []
    if config.train.precision == "float8":
        if config.model.lora is not None:
            raise UserError("train.precision: float8 trains whole weights; with model.lora use bfloat16")
        converted = use_float8(module, config.train.sensitive, emulate=place.device.type == "cpu")
        how = ", emulated (no gain on a CPU)" if place.device.type == "cpu" else ""
        lines.append(f"{len(converted)} linear layers run in float8{how}, the rest in bfloat16")
    if place.compute_dtype != torch.float32:
        wide = keep_wide(module, config.train.sensitive)
        lines += [f"{len(wide)} modules computed in float32 by train.sensitive: {wide[0]} …"] if wide else []
    return lines


def _learner(
    config: RunConfig,
    replicas: Replicas,
    optimizers: Optimizers,
    clock: StepClock,
    place: Place,
    state: resuming.Resumed,
    before_update: Callable[[], None],
) -> Learner:
    scale = LossScale(place.device.torch) if place.compute_dtype == torch.float16 else None
    if scale is not None and state.loss_scale is not None:
        scale.load(state.loss_scale)
    return Learner(
        replicas,
        optimizers,
        config.train.loss,
        config.optim.clip_norm,
        clock,
        scale=scale,
        agree=first_failure,
        before_update=before_update,
    )


def _spikes(
    config: RunConfig,
    learner: Learner,
    fit: Fit,
    stream: Stream,
    folder: RunFolder,
    place: Place,
    reporter: Reporter,
    tiers: Tiers,
    state: resuming.Resumed,
    say: Say,
) -> Spikes:
    """The guard, with the documents that were set aside before taken out of the stream."""
    aside = Quarantine(folder.quarantine, stream.view, writes=place.rank == 0, decode=decoder(config))
    ledger = control().on_main(lambda: read_ledger(folder.quarantine), UserError, (UserError, OSError))
    for note in aside.join(state.quarantine, ledger, state.position.epoch):
        say(note)
    if place.rank == 0:
        say(f"guard: {_guard_line(config)}")
    lora, clock = config.model.lora is not None, reporter.run_clock

    def back(before_step: int) -> Went | None:
        with clock.phase("downtime.reload"):
            return go_back(tiers, learner, before_step, trainable_only=lora, say=say)

    spikes = Spikes(
        config.guard,
        learner,
        fit,
        aside.stream(stream),
        aside,
        place.rank,
        place.world,
        f"seq_len {config.data.seq_len}, {stream.options.sequences_per_step} sequences of {stream.fingerprint[:12]}",
        reporter.incident,
        back,
        config.optim.clip_norm,
    )
    spikes.load(state.guard)
    reporter.watch = spikes.observe
    return spikes


def _guard_line(config: RunConfig) -> str:
    if config.guard.spikes != "act":
        return f"spikes: {config.guard.spikes}; nothing but what is not finite is held back"
    offered = ", then ".join(config.guard.actions) or "nothing"
    every = config.checkpoint.memory_every or config.checkpoint.every
    often = f", one every {every} steps" if isinstance(every, int) else ""
    back = f"back to checkpoints{often}" if every else "no checkpoint to go back to"
    return f"bad steps are held back, documents at fault set aside; else {back} ({offered}, then stop)"


def _fit(
    config: RunConfig, learner: Learner, model: BuiltModel, place: Place, reporter: Reporter, step: int, say: Say
) -> tuple[Fit, list[str], float]:
    """The recompute level: estimated, set, and (on a device) rehearsed on the worst micro-batch.

    Also returns what to say of it, and the optimizer state's bytes on this rank (estimated).
    """
    replicas, shards = learner.replicas, place.layout.shard
    choice = fitting.choose_level(config, model.shape, replicas, shards, place.ranks_here)
    fit = fitting.make_fit(config, model.module, choice, reporter.out_of_memory)
    lines = fitting.describe(config, choice, model.shape, replicas, shards)
    if choice.rehearse:
        lines.append(fitting.rehearse(fit, learner, config, model.shape.vocab, choice.optimizer_bytes))
    for line in lines:
        say(f"memory: {line}")
    return fit, lines, choice.optimizer_bytes


def _check_schedule(config: RunConfig, steps: int) -> None:
    misfit = config.schedule.misfit(steps)
    if misfit is not None:
        raise UserError(": ".join(misfit))


def _schedule(config: RunConfig, steps: int) -> Schedule:
    given = config.schedule
    return Schedule(given.kind, steps, given.warmup_steps(steps), given.decay_steps(steps), given.min_ratio)


def _peak(config: RunConfig, place: Place) -> Peak:
    return resolve_peak(
        place.device.name,
        _DTYPE_NAMES[place.compute_dtype],
        override=config.hardware.peak_flops,
        threads=place.device.threads or None,
        measured=MeasuredPeaks.load(),
    )


def _evaluator(config: RunConfig, view: View, place: Place, vocab: int) -> Evaluator | None:
    held_out = evaluation_view(config, view)
    if held_out is None:
        return None
    check_vocabulary(held_out, vocab)
    stream = make_stream(config, held_out, config.sequences_per_step(place.layout.data_parallel))
    return Evaluator(stream, place.rank, place.world, place.device.torch, config.eval.batches)


def _write_down(
    config: RunConfig, folder: RunFolder, place: Place, kernels: Chosen | None, compiled: Decision, peak: Peak
) -> None:
    def write() -> None:
        write_atomic(folder.config, dump_yaml(config))
        facts = {**collect_environment(), "peak": asdict(peak)}
        chosen = {} if kernels is None else {"kernels": as_record(kernels)}
        decided = decision_record(compiled, place.device.name) if config.train.compile == "auto" else {}
        write_json(folder.environment, {**facts, **chosen, **decided})

    control().on_main(write, UserError, (OSError,))


def _session_start(
    reporter: Reporter,
    state: resuming.Resumed,
    place: Place,
    steps: int,
    peak: Peak,
    model: BuiltModel,
    stream: Stream,
    memory: list[str],
    kernels: Chosen | None,
) -> SessionStart:
    facts: dict[str, Any] = {
        "model": model.shape.model_type,
        "parameters": model.shape.parameters,
        "trained_parameters": sum(p.numel() for p in model.module.parameters() if p.requires_grad),
        "precision": _DTYPE_NAMES[place.compute_dtype],
        "replicate": place.layout.replicate,
        "fsdp": place.layout.shard,
        "sequences_per_step": stream.options.sequences_per_step,
        "convention": describe(trainable=model.trainable, trained_head=_trained_head(kernels)),
        "memory": memory,
    }
    if state.notes:
        facts["notes"] = list(state.notes)
    return SessionStart(
        session=reporter.session,
        time=time.time(),
        resumed_from=state.step,
        world_size=place.world,
        steps=steps,
        device=place.device.name,
        peak_flops=reporter.peak_flops,
        peak_source=peak.line(place.world),
        facts=facts,
    )
