"""Two configurations compared: every changed key, and whether it makes another training."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings

from headway.config.diff import ABSENT, Change, config_diff, flatten, identity, is_identity, without_effect
from headway.config.run import RunConfig
from headway.config.schema import all_keys
from run_files import config, raw_configs


def changed(*overrides: str) -> list[str]:
    return [str(change) for change in config_diff(config(), config(*overrides))]


def test_changes_are_named_with_both_values() -> None:
    assert changed() == []
    both = changed("data.seq_len=64", "data.slots=128", "log.every=9")
    assert both == ["data.seq_len: 128 → 64", "log.every: 1 → 9"]
    assert changed("data.seq_len=64") == ["data.seq_len: 128 → 64", "data.slots: 128 → 64"]
    (change,) = config_diff(config(), config("data.sources=[b.jsonl]"))
    assert change.key == "data.sources" and change.identity
    (change,) = config_diff(config(), config("model.lora={rank: 8}"))
    assert (change.key, change.before, change.identity) == ("model.lora", None, True)
    assert change.after == {"rank": 8, "alpha": 32.0, "dropout": 0.0, "targets": "all-linear"}
    one, two = (config(f"model.config={{model_type: llama{more}}}") for more in ("", ", size: 3"))
    assert config_diff(one, two) == [Change("model.config.size", ABSENT, 3, True)]
    assert str(config_diff(two, one)[0]) == "model.config.size: 3 → (absent)"


def test_a_value_of_another_type_is_a_change() -> None:
    one, two = (config(f"model.config={{model_type: llama, tied: {value}}}") for value in ("1", "true"))
    assert 1 == True
    assert [change.key for change in config_diff(one, two)] == ["model.config.tied"]


IDENTITY = {
    "seed", "model.path", "model.config", "model.tokenizer", "model.dtype", "model.lora", "data.sources",
    "data.seq_len", "data.overlong", "data.labels", "data.pack", "data.slots", "data.keep_untrained", "train.steps",
    "train.precision", "train.loss.z_loss", "optim.lr", "optim.betas", "schedule.warmup", "eval.holdout",
    "train.global_batch_tokens",
}  # fmt: skip
FREE = {
    "name", "out", "device", "preset", "deterministic", "model.attention", "model.recompute", "data.shards",
    "data.workers", "data.prefetch", "data.max_bad", "train.compile", "parallel.fsdp", "parallel.ranks",
    "checkpoint.every", "checkpoint.keep", "checkpoint.resume", "checkpoint.allow", "eval.every", "log.every",
    "hardware.peak_flops",
}  # fmt: skip


def test_keys_without_effect_and_keys_that_follow_another_are_silent() -> None:
    def silent(one: tuple[str, ...], two: tuple[str, ...]) -> set[str]:
        return without_effect(identity(config(*one)), identity(config(*two)))

    assert {"optim.muon_lr", "optim.momentum", "data.slots"} <= silent((), ("optim.lr=30",))
    assert "optim.muon_lr" not in silent((), ("optim.name=muon", "optim.muon_lr=30"))
    assert "optim.muon_lr" in silent(("optim.name=muon",), ("optim.name=muon", "optim.lr=30"))  # it follows
    assert "data.slots" not in silent((), ("data.slots=256",))
    assert "schedule.decay" in silent((), ()) and "schedule.decay" not in silent((), ("schedule.kind=wsd",))


def test_what_makes_another_training_and_what_does_not() -> None:
    assert {key for key in IDENTITY if not is_identity(key)} == set()
    assert {key for key in FREE if is_identity(key)} == set()
    assert set(all_keys()) >= IDENTITY | FREE


@pytest.mark.parametrize("override", ["seed=1", "optim.lr=1", "data.labels=last", "model.lora={}", "eval.holdout=4"])
def test_a_changed_identity_is_seen_and_a_changed_habit_is_not(override: str) -> None:
    assert identity(config(override)) != identity(config())
    assert identity(config("log.every=7", "checkpoint.every=5", "parallel.ranks=2", "name=x")) == identity(config())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw_configs(), raw_configs())
def test_the_diff_is_exactly_the_values_that_differ(one: dict[str, Any], two: dict[str, Any]) -> None:
    before, after = RunConfig.model_validate(one), RunConfig.model_validate(two)
    changes = config_diff(before, after)
    assert config_diff(before, before) == []
    assert {change.key for change in changes} == {change.key for change in config_diff(after, before)}
    assert bool(changes) == (before != after)
    assert any(change.identity for change in changes) == (identity(before) != identity(after))


def test_the_identity_survives_json() -> None:
    values = identity(config("model.config={model_type: llama, x: {y: [1, 2.5]}}"))
    assert orjson.loads(orjson.dumps(values)) == values
    assert values["model.config.x.y"] == [1, 2.5] and "log.every" not in values


def test_flatten_keeps_empty_mappings() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": []}) == {"a.b": 1, "a.c": {}, "d": []}
