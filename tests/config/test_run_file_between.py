"""What must hold between keys, and what is valid but said aloud."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.account.errors import UserError
from headway.config.optim import ScheduleConfig
from headway.config.parallel import ParallelConfig
from run_files import LEAST, config, load, refusal


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.slots=64"],
            "data.slots: a pack of 64 slots cannot hold a document of data.seq_len = 128 tokens; "
            "set data.slots to 128 or more (null makes it data.seq_len)",
        ),
        (
            ["data.seq_len=4096", "data.slots=2048"],
            "data.slots: a pack of 2048 slots cannot hold a document of data.seq_len = 4096",
        ),
        (
            ["train.global_batch_tokens=200"],
            "train.global_batch_tokens: 200 is not a multiple of data.slots = 128; "
            "the nearest that is: 128 or 256",
        ),
        (
            ["train.global_batch_tokens=100", "data.pack=none", "data.slots=999"],
            "train.global_batch_tokens: 100 is not a multiple of "
            "data.seq_len = 128; the nearest that is: 128",
        ),
        (
            ["schedule.warmup=100"],
            "schedule.warmup: 100 steps of warm-up leave no step at the full rate in a "
            "training of 100 steps; lower schedule.warmup or train longer",
        ),
        (
            ["schedule.kind=wsd", "schedule.warmup=60", "schedule.decay=41"],
            "schedule.decay: 60 steps of warm-up and 41 of decay do not fit into a training "
            "of 100 steps",
        ),
        (
            ["schedule.kind=wsd", "schedule.warmup=0.6", "schedule.decay=0.5"],
            "schedule.decay: warmup 0.6 and decay 0.5 are together more than 1",
        ),
        (
            ["parallel.ranks=4", "parallel.fsdp=2"],
            "parallel.ranks: parallel.ranks is 4, but parallel.replicate × parallel.fsdp = "
            "1 × 2 = 2; they must be equal",
        ),
        (
            ["parallel.ranks=4", "parallel.replicate=3"],
            "parallel.ranks: parallel.ranks is 4, which parallel.replicate = 3 does not divide",
        ),
        (["eval.every=5"], "eval.every: there is nothing to evaluate on; set eval.data"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    key = message.partition(":")[0]
    named = next(override for override in overrides if override.startswith(key + "="))
    assert refusal(*overrides).startswith(f"override {named}: {message}")


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["data.pack=none", "data.slots=256"], "data.slots has no effect: packing is off (data.pack is none)"),
        (["data.rows=4"], "data.rows has no effect: documents are packed (data.pack is best_fit)"),
        (["data.pad_to=seq_len"], "data.pad_to has no effect: documents are packed"),
        (["data.group_by_length=on"], "data.group_by_length has no effect: documents are packed"),
        (["optim.muon_lr=1"], "optim.muon_lr has no effect: the optimizer is adamw"),
        (["optim.momentum=0.5"], "optim.momentum has no effect: the optimizer is adamw"),
        (["schedule.decay=0.5"], "schedule.decay has no effect: schedule.kind is cosine"),
        (["schedule.kind=constant", "schedule.min_ratio=0.1"], "schedule.min_ratio has no effect"),
        (["eval.batches=3"], "eval.batches has no effect"),
        (["model.config={model_type: llama}", "model.lora={}"], "model.lora trains adapters on random frozen weights"),
        (["model.dtype=bfloat16"], "model.dtype is bfloat16: updates smaller than about 0.4 % of a weight"),
        (["checkpoint.at_end=off"], "checkpoint.every is null and checkpoint.at_end is off"),
        (
            ["parallel.fsdp=3", "train.global_batch_sequences=4"],
            "the global batch of 4 packs does not divide by 3 (3 ranks): 2 of every 6 computed packs are padding",
        ),
        (
            ["data.pack=none", "parallel.ranks=1", "train.global_batch_sequences=12"],
            "the global batch of 12 rows does not divide by 8 (1 ranks): 4 of every 16 computed rows are padding",
        ),
    ],
)  # fmt: skip
def test_surprising_settings_are_said_in_one_line(overrides: list[str], warning: str) -> None:
    assert load().warnings == ()
    (line,) = load(*overrides).warnings
    assert line.startswith(warning) and "\n" not in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.pack=none", "data.rows=4", "data.pad_to=seq_len", "data.group_by_length=on"],
        ["optim.name=muon", "optim.muon_lr=1", "optim.momentum=0.5"],
        ["schedule.kind=wsd", "schedule.decay=0.5"],
        ["model.dtype=bfloat16", "model.lora={}"],
        ["parallel.fsdp=2", "train.global_batch_sequences=4"],
        ["parallel.replicate=2", "parallel.ranks=4"],
        ["eval.holdout=3", "eval.batches=4", "eval.every=2"],
    ],
)
def test_settings_that_work_are_not_warned_about(overrides: list[str]) -> None:
    assert load(*overrides).warnings == ()


def test_a_warning_about_packing_survives_the_frozen_file() -> None:
    from headway.config.dump import dump_yaml

    run = load("data.rows=4")
    assert load(text=dump_yaml(run.config)).warnings == run.warnings != ()


@given(st.integers(1, 10**7), st.integers(1, 99), st.integers(1, 99))
def test_fractions_become_steps_that_fit(total: int, warmup: int, decay: int) -> None:
    assume(warmup + decay <= 100)
    schedule = ScheduleConfig(kind="wsd", warmup=warmup / 100, decay=decay / 100)
    exact = math.ceil(Fraction(warmup, 100) * total)
    assert schedule.warmup_steps(total) == min(exact, total - 1)
    assert schedule.decay_steps(total) == max(math.floor(Fraction(decay, 100) * total), 1)
    assert schedule.misfit(total) is None


def test_planted_floating_point_rounding_would_give_one_step_more() -> None:
    assert math.ceil(0.07 * 100) == 8  # the fault
    assert ScheduleConfig(warmup=0.07).warmup_steps(100) == 7
    assert math.floor(0.29 * 100) == 28  # the fault
    assert ScheduleConfig(kind="wsd", decay=0.29).decay_steps(100) == 29
    assert math.floor(round(0.82 * 10_000_000, 9)) == 8_199_999  # rounding the product does not mend it
    assert ScheduleConfig(kind="wsd", decay=0.82).decay_steps(10_000_000) == 8_200_000


def test_steps_stay_steps() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup=10, decay=0)
    assert (schedule.warmup_steps(99), schedule.decay_steps(99)) == (10, 0)
    assert ScheduleConfig(warmup=2e3).warmup_steps(9000) == 2000
    assert config("train.steps=1").schedule.warmup_steps(1) == 0
    misfit = ScheduleConfig(warmup=10).misfit(10)
    assert misfit is not None and misfit[0] == "schedule.warmup"


def test_warm_up_cannot_be_judged_before_the_steps_are_known() -> None:
    run = config("train.epochs=1", "schedule.warmup=100")
    assert run.schedule.misfit(100) is not None and run.schedule.misfit(101) is None


@given(st.integers(1, 12), st.none() | st.integers(1, 12), st.integers(1, 64))
def test_dimensions_fill_the_world_or_are_refused(replicate: int, fsdp: int | None, world: int) -> None:
    parallel = ParallelConfig(replicate=replicate, fsdp=fsdp)
    fits = world % replicate == 0 if fsdp is None else replicate * fsdp == world
    if fits:
        dims = parallel.dims(world)
        assert dims[0] * dims[1] == world and dims[0] == replicate and fsdp in (None, dims[1])
        assert ParallelConfig(ranks=world, replicate=replicate, fsdp=fsdp).local_ranks(0) == world
    else:
        with pytest.raises(UserError, match="parallel: the world has"):
            parallel.dims(world)
        with pytest.raises(ValidationError):
            ParallelConfig(ranks=world, replicate=replicate, fsdp=fsdp)


@given(st.integers(1, 8), st.none() | st.integers(1, 8), st.integers(0, 16))
def test_the_ranks_that_are_started_fit_the_dimensions(replicate: int, fsdp: int | None, gpus: int) -> None:
    parallel = ParallelConfig(replicate=replicate, fsdp=fsdp)
    ranks = parallel.local_ranks(gpus)
    parallel.dims(ranks)
    if fsdp is None and gpus >= replicate:
        assert gpus - replicate < ranks <= gpus


@pytest.mark.parametrize(
    ("overrides", "ranks", "sequences"),
    [
        ([], 4, 4),
        (["data.pack=none"], 4, 32),
        (["train.global_batch_sequences=6"], 4, 6),
        (["train.global_batch_tokens=1280"], 4, 10),
        (["train.global_batch_tokens=1280", "data.slots=256"], 1, 5),
        (["train.global_batch_tokens=1280", "data.pack=none", "data.slots=256"], 1, 10),
    ],
)
def test_sequences_of_a_global_batch(overrides: list[str], ranks: int, sequences: int) -> None:
    assert config(*overrides).sequences_per_step(ranks) == sequences


def test_the_overflow_policy_has_one_default_that_the_reference_and_show_name() -> None:
    # trl 4554: a policy that changed under its users. Here it is frozen (test_run_file_keys) and always shown.
    from headway.config.show import show_text

    assert config().data.overlong == "truncate"
    assert "\n  overlong: truncate  # default\n" in show_text(load(text=LEAST))
