"""Defaults < preset < run file < overrides; where each value came from; what relative paths are relative to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.layers import Assignment, Origin, combine
from headway.config.load import load_run
from run_files import LEAST, config, load, refusal


def test_each_layer_wins_over_those_before_it() -> None:
    preset = LEAST + "preset: naive\n"
    assert config().data.pack == "best_fit"
    assert config(text=preset).data.pack == "none"
    written = preset.replace("  seq_len: 128", "  seq_len: 128\n  pack: best_fit")
    assert config(text=written).data.pack == "best_fit"
    assert config("data.pack=none", text=written).data.pack == "none"


def test_the_preset_itself_can_be_overridden() -> None:
    run = load("preset=fast", text=LEAST + "preset: naive\n")
    assert run.config.preset == "fast" and run.config.model.recompute == "auto"  # naive says full


def test_the_last_of_two_overrides_wins() -> None:
    assert config("seed=1", "seed=2").seed == 2


def test_every_value_knows_where_it_came_from() -> None:
    run = load("optim.eps=1e-6", "data.sources=[b.jsonl]", text=LEAST + "preset: naive\nlog: {every: 5}\n")
    origins = {key: str(run.provenance.of(key)) for key in run.provenance.origins}
    assert origins["data.seq_len"] == "run.yaml:4"
    assert origins["log.every"] == "run.yaml:9"
    assert origins["optim.eps"] == "override optim.eps=1e-6"
    assert origins["data.sources"] == "override data.sources=[b.jsonl]"
    assert origins["data.pack"] == "preset naive"
    assert str(run.provenance.of("data.labels")) == "default"
    assert run.provenance.of("data.labels").kind == "default"


@given(st.permutations(range(4)), st.sets(st.integers(0, 3), min_size=1))
def test_the_winner_is_the_highest_layer_that_sets_the_key(order: list[int], setting: set[int]) -> None:
    kinds = ("default", "preset", "file", "override")
    layers = [
        [Assignment("a.b", order[i], {"a.b": Origin(kinds[i], kinds[i])})] if i in setting else [] for i in range(4)
    ]
    values, provenance = combine(layers)
    assert values == {"a": {"b": order[max(setting)]}}
    assert provenance.of("a.b").kind == kinds[max(setting)]


def test_an_override_chooses_another_of_a_group() -> None:
    run = config("train.epochs=2")
    assert (run.train.steps, run.train.epochs) == (None, 2.0)
    run = config("model.config={model_type: llama}")
    assert run.model.path is None and run.model.tokenizer is None
    text = LEAST + "eval: {data: [e.jsonl], every: 5}\n"
    assert config("eval.holdout=3", text=text).eval.data is None
    assert config("eval.holdout=0", text=text).eval.data is not None
    batch = LEAST.replace("steps: 100", "steps: 100\n  global_batch_tokens: 256")
    assert config("train.global_batch_sequences=3", text=batch).train.global_batch_tokens is None


def test_two_of_a_group_in_one_layer_are_refused() -> None:
    assert refusal("train.epochs=2", "train.tokens=3").startswith(
        "override train.tokens=3: train.tokens: give exactly one of train.steps, train.epochs and train.tokens; "
        "given: train.epochs, train.tokens"
    )
    text = LEAST.replace("steps: 100", "steps: 100\n  epochs: 2")
    assert refusal(text=text).startswith("run.yaml:7: train.epochs: give exactly one of")
    assert "both are given" in refusal(text=LEAST.replace("path: ./m", "path: ./m, config: c.json"))
    both = LEAST.replace("steps: 100", "steps: 100\n  global_batch_tokens: 128\n  global_batch_sequences: 1")
    assert refusal(text=both).startswith("run.yaml:8: train.global_batch_sequences: give at most one of")
    assert "give at most one of eval.data and eval.holdout" in refusal("eval.data=[e]", "eval.holdout=2")


def test_lora_can_be_switched_on_changed_and_off() -> None:
    assert config().model.lora is None
    on = config("model.lora.rank=8").model.lora
    assert on is not None and (on.rank, on.alpha) == (8, 32.0)
    defaults = config("model.lora={}").model.lora
    assert defaults is not None and defaults.rank == 16
    text = LEAST.replace("path: ./m", "path: ./m, lora: {rank: 4, alpha: 7}")
    changed = config("model.lora.rank=8", text=text).model.lora
    assert changed is not None and (changed.rank, changed.alpha) == (8, 7.0)
    merged = config("model.lora={rank: 9}", text=text).model.lora
    assert merged is not None and (merged.rank, merged.alpha) == (9, 7.0)
    assert config("model.lora=null", text=text).model.lora is None
    assert config("model.lora.targets=all-linear", text=text).model.lora is not None
    targets = config("model.lora.targets=[q_proj,v_proj]").model.lora
    assert targets is not None and targets.targets == ["q_proj", "v_proj"]


def test_an_inline_model_config_can_be_changed_or_replaced() -> None:
    text = LEAST.replace("path: ./m", "config: {model_type: llama, hidden_size: 64}")
    run = load("model.config.hidden_size=32", "model.config.rope.theta=1e4", text=text)
    assert run.config.model.config == {"model_type": "llama", "hidden_size": 32, "rope": {"theta": 1e4}}
    assert str(run.provenance.of("model.config.model_type")) == "run.yaml:1"
    assert str(run.provenance.of("model.config.hidden_size")) == "override model.config.hidden_size=32"
    run = load("model.config={model_type: gpt2}", text=text)
    assert run.config.model.config == {"model_type": "gpt2"}
    assert "model.config.hidden_size" not in run.provenance.origins
    assert "needs model_type" in refusal("model.config.hidden_size=32")


def test_derived_defaults_follow_the_keys_that_give_them() -> None:
    run = config("optim.lr=3e-4", "data.seq_len=64")
    assert (run.data.slots, run.optim.muon_lr, run.model.tokenizer) == (64, 3e-4, "/files/m")
    text = LEAST.replace("  seq_len: 128", "  seq_len: 128\n  slots: 256")
    assert config("data.slots=null", text=text).data.slots == 128
    assert config("model.tokenizer=null").model.tokenizer == "/files/m"
    assert config("name=null").name == "run"
    assert run.shards == Path("/current/runs/shards") and config("data.shards=/s").shards == Path("/s")
    assert run.folder == Path("/current/runs/run")


def test_paths_in_the_file_start_there_and_overrides_in_the_current_folder() -> None:
    text = LEAST.replace("[a.jsonl]", "[a.jsonl, ../b/*.jsonl, {path: /abs/c}, 's3://bucket/d']") + "out: results\n"
    run = config(text=text)
    assert [source.path for source in run.data.sources] == [
        "/files/a.jsonl", "/b/*.jsonl", "/abs/c", "s3://bucket/d",
    ]  # fmt: skip
    assert run.out == Path("/files/results") and run.model.path == "/files/m"
    run = config("data.sources=[a.jsonl]", "out=results", "model.path=./m", "data.chat_template=t.jinja")
    assert [source.path for source in run.data.sources] == ["/current/a.jsonl"]
    assert run.out == Path("/current/results") and run.model.path == "/current/m"
    assert run.data.chat_template == Path("/current/t.jinja")
    assert config().out == Path("/current/runs")


def test_home_and_words_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert config("out=~/runs").out == Path("/home/someone/runs")
    assert config().checkpoint.resume == "auto" and config("checkpoint.resume=never").checkpoint.resume == "never"
    assert config("checkpoint.resume=./auto").checkpoint.resume == "/current/auto"


def test_a_model_is_a_hub_name_unless_there_is_such_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(LEAST.replace("./m", "org/name"))
    assert load_run(path).config.model.path == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load_run(path).config.model.path == str(tmp_path / "org" / "name")
    path.write_text(LEAST.replace("./m", "some/deep/folder"))
    assert load_run(path).config.model.path == str(tmp_path / "some/deep/folder")


def test_the_run_is_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "my-first.run.yaml"
    path.write_text(LEAST)
    assert load_run(path).config.name == "my-first.run"
    assert load_run(path, ["name=other"]).config.name == "other"


def test_one_source_may_stand_without_a_list() -> None:
    assert config("data.sources=a.jsonl").data.sources == config("data.sources=[a.jsonl]").data.sources
    assert config("data.sources={path: a, weight: 2}").data.sources[0].weight == 2


@pytest.mark.parametrize("override", ["seed", "=3", "", "seed 3"])
def test_an_override_without_key_and_value_is_refused(override: str) -> None:
    assert refusal(override) == f"override {override!r}: write it as key=value, e.g. data.seq_len=4096"


def test_text_overrides_need_no_quoting() -> None:
    assert config("name=a: b #c").name == "a: b #c"
    assert config("out=*x").out == Path("/current/*x")
    assert config("name='quoted'").name == "quoted" and config('name="null"').name == "null"
