"""What is dumped or shown reads back to the same configuration, whatever the values."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from headway.config.dump import as_plain, dump_yaml
from headway.config.run import RunConfig
from headway.config.show import show_records, show_rows, show_text
from run_files import LEAST, config, load, raw_configs

_SLOW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_SLOW
@given(raw_configs())
def test_a_dumped_configuration_reads_back_equal(raw: dict[str, Any]) -> None:
    before = RunConfig.model_validate(raw)
    after = load(text=dump_yaml(before))
    assert after.config == before
    assert as_plain(after.config) == as_plain(before)


@_SLOW
@given(raw_configs())
def test_what_show_prints_is_a_run_file(raw: dict[str, Any]) -> None:
    run = load(text=dump_yaml(RunConfig.model_validate(raw)))
    assert load(text=show_text(run)).config == run.config


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw_configs())
def test_other_yaml_readers_see_the_same_values(raw: dict[str, Any]) -> None:
    # Tools around a run folder read run.yaml with YAML 1.1: its traps must be quoted.
    configuration = RunConfig.model_validate(raw)
    assert yaml.safe_load(dump_yaml(configuration)) == as_plain(configuration)


def test_planted_traps_break_a_plain_dump() -> None:
    # Plain PyYAML leaves `1e-5` unquoted, because in YAML 1.1 it is text; read as a run file it becomes a number.
    text = LEAST.replace("path: ./m", 'config: {model_type: llama, note: "1e-5"}')
    before = config(text=text)
    planted = load(text=yaml.safe_dump(as_plain(before))).config
    assert planted != before and config(text=dump_yaml(before)) == before


@pytest.mark.parametrize("sign", ["\n", "\r", "\x85", "\u2028", "\u2029", "\ufeff", "\x07", "\t"])
def test_line_breaks_and_odd_signs_survive(sign: str) -> None:
    # Plain PyYAML folds some of them: a run file with such a path would read back as another one.
    raw = as_plain(config()) | {"model": {"config": {"model_type": "llama", "note": f"a {sign} b", sign: sign}}}
    before = RunConfig.model_validate(raw)
    run = load(text=dump_yaml(before))
    assert run.config == before and load(text=show_text(run)).config == before


def test_the_dump_is_stable_and_complete() -> None:
    text = dump_yaml(config())
    assert text == dump_yaml(load(text=text).config)
    assert text.startswith("# Headway run file")
    assert list(yaml.safe_load(text)) == list(RunConfig.model_fields)


def test_show_prints_every_key_with_value_origin_and_description() -> None:
    run = load("data.rows=4", text=LEAST + "preset: naive\n")
    rows = {row.key: row for row in show_rows(run)}
    assert rows["data.rows"].value == 4 and str(rows["data.rows"].origin) == "override data.rows=4"
    assert str(rows["data.seq_len"].origin) == "run.yaml:4" and str(rows["data.pack"].origin) == "preset naive"
    assert str(rows["data.slots"].origin) == "default (= data.seq_len)" and rows["data.slots"].value == 128
    assert rows["model.lora"].value is None
    assert all(row.description for row in rows.values())
    text = show_text(run)
    assert "\n  # Longest training document, in tokens;" in text and "\n  seq_len: 128  # run.yaml:4\n" in text
    assert show_records(run)[0] == {
        "key": "version", "value": 1, "origin": {"kind": "default", "where": "default"},
        "description": "Format of the run file; a file without it is of the current format.",
    }  # fmt: skip


def test_show_expands_an_inline_model_config() -> None:
    text = LEAST.replace("path: ./m", "config: {model_type: llama, 'a.b': 1, empty: {}, list: [1, {c: 2}]}")
    run = load("model.config.hidden_size=8", text=text)
    shown = show_text(run)
    assert "    hidden_size: 8  # override model.config.hidden_size=8\n" in shown
    assert load(text=shown).config == run.config


@pytest.mark.parametrize("override", ['name="a\\nb: 2"', "name=x # y"])
def test_origins_with_odd_text_stay_in_their_comment(override: str) -> None:
    run = load(override.replace("\\nb", " b"))
    assert load(text=show_text(run)).config == run.config
