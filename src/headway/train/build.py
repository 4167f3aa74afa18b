"""Assembles a run on one rank, in order: device, ranks, data, model, wrapping, state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from headway.account.errors import UserError
from headway.account.events import Observer, SessionStart
from headway.account.flops import describe
from headway.account.peaks import Peak
from headway.account.run_clock import RunClock
from headway.account.totals import Totals
from headway.config.dump import dump_yaml
from headway.config.run import RunConfig
from headway.data.feed import Feeder
from headway.data.options import Progress
from headway.data.stream import Stream
from headway.data.view import View
from headway.guard.beacon import Beacon, watch_compilation
from headway.guard.checkpoint import CheckpointStore
from headway.guard.environment import collect_environment
from headway.guard.folder_lock import FolderLock
from headway.guard.ledger import Ledger, Listener
from headway.guard.process_group import control
from headway.guard.quarantine import Quarantine, read_lines
from headway.guard.ranks import RankEnv, is_prepared, restart_of, supervised_restart
from headway.guard.signals import StopRequest
from headway.guard.tiers import Tiers
from headway.record.files import write_atomic, write_json
from headway.record.folder import RunFolder
from headway.record.jsonl import PatientWriter, complain
from headway.train import fitting
from headway.train import resume as resuming
from headway.train.agreement import first_failure
from headway.train.assemble import Assembled, assemble, refuse_other_tokens
from headway.train.cadence import SPIKES_A_STEP, Cadence, Every, unit_of
from headway.train.clock import StepClock
from headway.train.data import Say, decoder, evaluation_view, make_stream, prepare_sources, total_steps, training_view
from headway.train.decisions import Known, known_decisions
from headway.train.evaluate import Evaluator
from headway.train.export import export_live
from headway.train.flop_counter import FlopCounter
from headway.train.hook import HookFactory, HookPlace
from headway.train.look import remote_place
from headway.train.loss_scale import LossScale
from headway.train.memory import Fit
from headway.train.model import BuiltModel, check_model_section
from headway.train.place import Place, find_place, peak_of
from headway.train.places import describe as describe_places
from headway.train.places import no_room, refuse_a_full_disk, too_small
from headway.train.reporter import Reporter
from headway.train.rollback import Went, go_back
from headway.train.run import Run
from headway.train.saves import Saves, every_of
from headway.train.schedule import Schedule
from headway.train.spikes import Spikes
from headway.train.step import Learner
from headway.train.supply import Supply
from headway.train.unended import end_what_is_left, tell_of_checkpoints_gone, tell_of_the_session_before

_LOCK_PATIENCE_S = 60.0


def build_run(
    config: RunConfig,
    rank_env: RankEnv | None,
    run_clock: RunClock,
    observers: Callable[[], Sequence[Observer]],
    say: Say,
    hook: HookFactory | None = None,
    beacon: Beacon | None = None,
    progress: Callable[[Progress], None] | None = None,
    listeners: Sequence[Listener] = (),
) -> Run:
    """Builds one rank's run. Collective: every rank calls it, and it succeeds or fails on all.

    `listeners`: of this rank's ledger, from its first line on (what a start says of the session before, too).

    Raises:
        UserError: anything wrong with the run file, the data, the model, the machine or the checkpoint.
    """
    lock = FolderLock(config.folder)
    try:
        with run_clock.phase("startup.launch"):
            return _build(config, rank_env, run_clock, observers, say, lock, hook, beacon, progress, listeners)
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
    listeners: Sequence[Listener],
) -> Run:
    place = find_place(config, rank_env)
    folder = RunFolder(config.folder).create()
    if folder.final_model.is_file() or config.folder.resolve() == config.shards.resolve():
        raise UserError(f"{folder.root}: the run folder holds other things under our names; set another name")
    if not is_prepared(os.environ):
        check_model_section(config)
    # After a restart the dead rank's machine may not have let go yet.
    patience = _LOCK_PATIENCE_S if restart_of(os.environ) else 0.0
    control().on_main(lambda: lock.acquire(patience), UserError, (UserError, OSError))
    if not restart_of(os.environ):  # one that was trained beside a full disk goes on beside it
        control().on_main(lambda: refuse_a_full_disk(folder), UserError, (UserError, OSError))
    remote = remote_place(config)
    store = CheckpointStore(folder.checkpoints, resuming.run_id(folder, remote))
    control().on_main(store.sweep, UserError, (OSError,))
    tiers = Tiers(
        store,
        folder.root,
        keep_memory=config.checkpoint.keep_memory,
        device_type=place.device.type,
        timeout_s=config.checkpoint.timeout_s,
        remote=remote,
        copies=config.checkpoint.copies,
    )
    for note in tiers.notes:
        say(note)
    found = resuming.find_checkpoint(config, tiers)
    with run_clock.phase("startup.data"):
        if not is_prepared(os.environ):
            control().on_main(lambda: prepare_sources(config, say, progress), UserError, (UserError, OSError))
        view, stream = _data(config, place, say)
        steps = total_steps(config, stream)
        _check_schedule(config, steps)
        resuming.refuse_early(config, stream, found)
    with run_clock.phase("startup.model"):
        known = known_decisions(folder.environment, found, say)
        made = assemble(config, place, view, steps, known, say)
        model = made.model
    identity = resuming.run_identity(config, stream, model.config.to_dict(), model.base_digest)
    with run_clock.phase("startup.model" if found is None else "downtime.reload"):
        # Dropout must differ between ranks; a resume then restores each rank's own generators.
        torch.manual_seed(config.seed + place.rank)
        state = resuming.resume(config, found, made.replicas, made.optimizers, identity)
    for note in state.notes:
        say(note)
    stream = _shaped(stream, place, made)
    if stream.options.trim:
        say("data: packs end with their last document: empty slots are not computed")
    evaluator = _evaluator(config, view, place, made, say)
    peak = peak_of(config, place, say)
    session = resuming.next_session(folder)
    clock = StepClock(place.device.type)
    clock.watch = beacon
    _write_down(config, folder, made, peak)
    reporter = Reporter(
        session=session,
        rank=place.rank,
        clock=clock,
        run_clock=run_clock,
        totals=state.totals or Totals(),
        session_totals=Totals(),
        observers=observers(),
        rank_file=PatientWriter(folder.rank(place.rank)),
        ledger=Ledger(folder.incidents, rank=place.rank, listeners=listeners),
        peak_flops=peak.flops * place.world if peak.flops else None,
        compiled=made.compiles,
    )
    if not supervised_restart(os.environ):  # else the supervisor knows what it died of
        tell_of_the_session_before(folder, state.step, reporter, control(), anew=restart_of(os.environ) > 0)
    if found is None and (gone := tell_of_checkpoints_gone(folder, reporter, control())):
        say(gone)
    if rank_env is None or rank_env.local_rank == 0:
        end_what_is_left(folder, reporter)
    if beacon is not None and reporter.compiled:
        watch_compilation(beacon)
    learner = _learner(config, made, clock, place, state, tiers.fence)
    with run_clock.phase("compile"):
        fit, facts, optimizer_bytes = _fit(config, learner, model, place, reporter, known, say)
    failures, device_s = resuming.failures_so_far(folder)
    every = every_of(config.checkpoint)
    kept = [p for p in model.module.parameters() if p.requires_grad or config.model.lora is None]
    saved, optimizer_size = sum(p.numel() * p.element_size() for p in kept), optimizer_bytes * place.layout.shard
    tiers.off = tiers.off or too_small(config.checkpoint, tiers, saved + optimizer_size, place.world)
    if tiers.off:
        every["memory"] = None
    if every["memory"] == "auto":
        # A resume has the optimizer's state already.
        to_come = optimizer_bytes * place.ranks_here if place.device.type == "cpu" and found is None else 0.0
        why_none = no_room(config.checkpoint, tiers, saved + optimizer_size, to_come, place.world)
        if why_none:
            every["memory"] = None
            say(f"checkpoints: {why_none}")
    spikes_a_step = SPIKES_A_STEP if config.guard.spikes == "act" else 0.0
    cadence = Cadence(
        every, place.world, failures, device_s, control(), say, spikes=spikes_a_step, unit=unit_of(place.device.name)
    )
    saves = Saves(config.checkpoint, tiers, reporter, say, cadence, lambda: run_clock.account().wall_ns / 1e9)
    reporter.on_step = saves.step
    if found is not None:
        for reason in found.ref.rejected:
            action = f"went on from step {state.step} ({found.tier})"
            reporter.incident("checkpoint rejected", state.step, reason, action)
    for line in describe_places(config.checkpoint, tiers, every["memory"], saved, optimizer_size, place.world):
        say(f"checkpoints: {line}")
    say(f"guard: {_guard_line(config, every['memory'])}")
    spikes = _spikes(config, learner, fit, stream, folder, place, reporter, tiers, state, made.model.shape.vocab, say)
    return Run(
        config=config,
        session_start=_session_start(reporter, state, place, steps, peak, made, stream, facts),
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
        counter=FlopCounter(model.shape, model.trainable, place.world, made.trained_head),
        reporter=reporter,
        run_clock=run_clock,
        saves=saves,
        lock=lock,
        # Last: until here a signal ends the process at once, since there is nothing to save.
        stop=StopRequest(),
        identity=identity,
        decisions=made.decisions,
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


def _data(config: RunConfig, place: Place, say: Say) -> tuple[View, Stream]:
    view = training_view(config)
    stream = make_stream(config, view, config.sequences_per_step(place.layout.data_parallel))
    for fact in (view.overlong, view.untrained, stream.efficiency(0)):
        say(f"data: {fact}")
    return view, stream


def _learner(
    config: RunConfig,
    made: Assembled,
    clock: StepClock,
    place: Place,
    state: resuming.Resumed,
    before_update: Callable[[], None],
) -> Learner:
    scale = LossScale(place.device.torch) if place.compute_dtype == torch.float16 else None
    if scale is not None and state.loss_scale is not None:
        scale.load(state.loss_scale)
    learner = Learner(
        made.replicas,
        made.optimizers,
        config.train.loss,
        config.optim.clip_norm,
        clock,
        scale=scale,
        agree=first_failure,
        before_update=before_update,
    )
    if made.kernels is not None:
        learner.clipping = made.kernels.of_update("clipping", learner.clipping)
    return learner


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
    vocabulary: int,
    say: Say,
) -> Spikes:
    """The guard, with the documents that were set aside before taken out of the stream."""
    aside = Quarantine(folder.quarantine, stream.view, writes=place.rank == 0, decode=decoder(config))
    ledger = control().on_main(lambda: read_lines(folder.quarantine), UserError, (UserError, OSError))
    for number, why in ledger.bad:
        say(f"quarantine: {folder.quarantine}:{number} cannot be read: {why}")
    for note in aside.join(state.quarantine, ledger.items, state.position.epoch):
        say(note)
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
        vocabulary,
        tiers.newest_step,
    )
    spikes.load(state.guard)
    reporter.watch = spikes.observe
    return spikes


def _guard_line(config: RunConfig, memory_every: Every) -> str:
    if config.guard.spikes != "act":
        return f"spikes: {config.guard.spikes}; nothing but what is not finite is held back"
    offered = ", then ".join(config.guard.actions) or "nothing"
    every = memory_every or config.checkpoint.every
    often = f", one every {every} steps" if isinstance(every, int) else ""
    back = f"back to checkpoints{often}" if every else "no checkpoint to go back to"
    return f"bad steps are held back, documents at fault set aside; else {back} ({offered}, then stop)"


def _fit(
    config: RunConfig, learner: Learner, model: BuiltModel, place: Place, reporter: Reporter, known: Known, say: Say
) -> tuple[Fit, list[str], float]:
    """The recompute level: estimated, set, and (on a device) rehearsed on the worst micro-batch.

    Also returns what to say of it, and the optimizer state's bytes on this rank (estimated).
    """
    replicas, shards = learner.replicas, place.layout.shard
    choice = fitting.choose_level(config, model.shape, replicas, shards, place.ranks_here)
    parts = fitting.parts_before(known, place.device.name, place.world)
    fit = fitting.make_fit(config, model.module, choice, reporter.out_of_memory, parts)
    ran = [fitting.rehearse(fit, learner, config, model.shape.vocab, choice)] if choice.rehearse else []
    lines = fitting.describe(config, choice, fit.level, model.shape, replicas, shards) + ran
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


def _shaped(stream: Stream, place: Place, made: Assembled) -> Stream:
    """A CPU computes a pack of any size as fast; where something is compiled, or on a device, one shape is worth more
    than the few empty slots of a pack."""
    anything_goes = place.device.type == "cpu" and stream.options.pack == "best_fit" and not made.compiles
    return stream.trimmed() if anything_goes else stream


def _evaluator(config: RunConfig, view: View, place: Place, made: Assembled, say: Say) -> Evaluator | None:
    held_out = evaluation_view(config, view)
    if held_out is None:
        return None
    refuse_other_tokens(config, held_out, made.model)
    if held_out.overlong.affected:
        say(f"evaluation: {held_out.overlong}")
    stream = make_stream(config, held_out, config.sequences_per_step(place.layout.data_parallel))
    return Evaluator(_shaped(stream, place, made), place.rank, place.world, place.device.torch, config.eval.batches)


def _write_down(config: RunConfig, folder: RunFolder, made: Assembled, peak: Peak) -> None:
    def write() -> None:
        try:
            save()
        except OSError as error:
            if not folder.config.is_file() or not folder.environment.is_file():
                raise
            complain(f"{error.filename}: not renewed ({error.strerror}); the start before wrote one")

    def save() -> None:
        write_atomic(folder.config, dump_yaml(config))
        write_json(folder.environment, {**collect_environment(), "peak": asdict(peak), **made.decisions})

    control().on_main(write, UserError, (OSError,))


def _session_start(
    reporter: Reporter,
    state: resuming.Resumed,
    place: Place,
    steps: int,
    peak: Peak,
    made: Assembled,
    stream: Stream,
    memory: list[str],
) -> SessionStart:
    facts: dict[str, Any] = {
        "model": made.model.shape.model_type,
        "parameters": made.model.shape.parameters,
        "trained_parameters": sum(p.numel() for p in made.model.module.parameters() if p.requires_grad),
        "precision": place.dtype_name,
        "replicate": place.layout.replicate,
        "fsdp": place.layout.shard,
        "sequences_per_step": stream.options.sequences_per_step,
        "convention": describe(trainable=made.model.trainable, trained_head=made.trained_head),
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
