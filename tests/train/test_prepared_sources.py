"""Sources that were prepared before the run: what the run file says of them must be how they were prepared."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.test_megatron import write as write_megatron
from headway.account.errors import UserError
from headway.config.dump import dump_yaml
from headway.config.load import load_run
from headway.data.options import PrepareOptions, Progress
from headway.data.prepare import prepare
from headway.prove.trainee import build_apart
from headway.train.data import evaluation_view, prepare_sources, training_view
from headway.train.model import check_model_section
from tiny import CHATML, make_chats, make_tokenizer, run_file
from train.running import run

OTHER = "<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML


def shards(folder: Path, tokenizer: Path, source: Path | None = None, **options: Any) -> Path:
    prepare([source or make_chats(folder / "more.jsonl")], folder / "made", str(tokenizer), workers=1,
            options=PrepareOptions(**options))  # fmt: skip
    return folder / "made"


def other_words(folder: Path) -> Path:
    """A tokenizer of the same size in which two tokens have changed places."""
    made = make_tokenizer(folder)
    spec = json.loads((made / "tokenizer.json").read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (made / "tokenizer.json").write_text(json.dumps(spec))
    return made


def other_rules(folder: Path) -> Path:
    """A tokenizer of the same ids that normalises texts first."""
    made = make_tokenizer(folder)
    spec = json.loads((made / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "NFC"}
    (made / "tokenizer.json").write_text(json.dumps(spec))
    return made


def said_of(path: Path, *overrides: str) -> list[str]:
    said: list[str] = []
    prepare_sources(load_run(path, list(overrides)).config, said.append)
    return said


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        said_of(path, *overrides)
    return str(refused.value)


@pytest.mark.parametrize("key", ["data.sources", "eval.data"])
@pytest.mark.parametrize(("other", "said"), [(other_words, "id 6"), (other_rules, "rules or special tokens")])
def test_shards_of_another_tokenizer_are_refused(tmp_path: Path, key: str, other: Any, said: str) -> None:
    path = run_file(tmp_path)
    made = shards(tmp_path, other(tmp_path / "other"))
    refused = refusal(path, f"{key}=[{made}]")
    assert f"{key}[0] {made}: made with the tokenizer {tmp_path / 'other'}" in refused and "model.tokenizer" in refused
    assert said in refused
    assert not said_of(path, f"{key}=[{made}]", f"model.tokenizer={tmp_path / 'other'}")[
        : -2 if "eval" in key else None
    ]


def test_the_command_refuses_shards_of_another_tokenizer(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    done = run(path, f"data.sources=[{shards(tmp_path, other_words(tmp_path / 'other'))}]", expect=2)
    assert "model.tokenizer" in done.err and "Traceback" not in done.err


def test_sources_of_two_tokenizers_are_refused_without_one_of_the_model(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    first, second = shards(tmp_path, tmp_path / "tokenizer"), tmp_path / "second"
    second.mkdir()
    other = shards(second, other_words(tmp_path / "other"))
    assert "another tokenizer" in refusal(path, f"data.sources=[{first}, {other}]", "model.tokenizer=null")


# What was prepared, the key as the run file sets it, and the value that agrees.
CONTRADICTIONS = [
    ({}, "data.labels", "last", "all"),
    ({"labels": "last"}, "data.labels", "all", "last"),
    ({}, "data.chat_template", "{template}", "null"),
    ({"chat_template": "{template}"}, "data.chat_template", "{other}", "{template}"),
    ({"max_bad": 0.5}, "data.max_bad", "0.02", "0.5"),
    ({}, "format", "text", "messages"),
]


def _written(path: Path, made: Path, key: str, value: str) -> list[str]:
    if key == "format":
        return [f"data.sources=[{{path: {made}, format: {value}}}]"]
    return [f"data.sources=[{made}]", f"{key}={value}"]


@pytest.mark.parametrize(("options", "key", "wrong", "right"), CONTRADICTIONS)
def test_a_key_that_contradicts_how_shards_were_made_is_refused(
    tmp_path: Path, options: dict[str, Any], key: str, wrong: str, right: str
) -> None:
    path = run_file(tmp_path)
    files = {"template": tmp_path / "t.jinja", "other": tmp_path / "o.jinja"}
    files["template"].write_text(OTHER)
    files["other"].write_text("Hello\n" + OTHER)
    source = make_chats(tmp_path / "more.jsonl")
    source.write_text(source.read_text() + "{\n" * (10 if key == "data.max_bad" else 0))
    options = {name: value.format(**files) if isinstance(value, str) else value for name, value in options.items()}
    made = shards(tmp_path, tmp_path / "tokenizer", source, **options)
    refused = refusal(path, *_written(path, made, key, wrong.format(**files)))
    assert f"data.sources[0] {made}" in refused and key in refused
    assert said_of(path, *_written(path, made, key, right.format(**files))) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [({"labels": "last"}, "data.labels is all (default)"), ({"chat_template": "t"}, "stays as it is")],
)
def test_a_default_that_does_not_hold_is_said_not_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = run_file(tmp_path)
    (tmp_path / "t").write_text(OTHER)
    if "chat_template" in options:
        options = {"chat_template": str(tmp_path / "t")}
    made = shards(tmp_path, tmp_path / "tokenizer", **options)
    (line,) = said_of(path, f"data.sources=[{made}]")
    assert said in line and str(made) in line
    # The resolved file of that run writes every key; it must still run.
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_yaml(load_run(path, [f"data.sources=[{made}]"]).config))
    assert said_of(resolved) == [line]


def test_keys_about_chats_say_that_they_do_nothing_to_text_and_tokens(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    (tmp_path / "t.txt").write_text("the cat runs")
    made = shards(tmp_path, tmp_path / "tokenizer", tmp_path / "t.txt")
    tokens = write_megatron(tmp_path, [[[1, 2, 3]]])
    for source in (made, tokens):
        assert said_of(path, f"data.sources=[{source}]") == []
        (line,) = said_of(path, f"data.sources=[{source}]", "data.labels=last")
        assert str(source) in line and "data.labels" in line
    assert "format" in refusal(path, f"data.sources=[{{path: {tokens}, format: text}}]")


def test_a_set_of_unknown_vocabulary_is_guarded_by_the_models(tmp_path: Path) -> None:
    """A Megatron set declares what its type can hold: no loss was above that of guessing among four billion tokens."""
    path = run_file(tmp_path)
    tokens = write_megatron(tmp_path, [[[1, 2, 3, 4]]] * 8, np.int32)
    config = load_run(path, [f"data.sources=[{tokens}]"]).config
    made = build_apart(config, tmp_path / "scratch")
    assert made.spikes.watcher.uniform == math.log(320)
    assert list(json.loads((config.shards / "largest_tokens.json").read_text()).values()) == [4]
    made.close("failed")


def test_every_long_stage_tells_how_far_it_is(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    config = load_run(path, []).config

    def stages() -> dict[str, list[Progress]]:
        told: list[Progress] = []
        prepare_sources(config, lambda text: None, told.append)
        return {stage: [p for p in told if p.stage == stage] for stage in ("comparing", "tokenising", "verifying")}

    first, again = stages(), stages()
    assert not first["comparing"] and first["tokenising"] and first["verifying"], (
        "the first start tokenises and verifies"
    )
    assert again["comparing"] and not again["tokenising"] and again["verifying"], "a resume compares and verifies"
    for made in (first["tokenising"], first["verifying"], again["comparing"], again["verifying"]):
        assert made[-1].bytes_done == made[-1].bytes_total > 0


def test_a_tokenizer_that_is_not_there_is_named_before_anything_else(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    (tmp_path / "chats.jsonl").unlink()
    with pytest.raises(UserError, match=r"^model.tokenizer nowhere: no such folder"):
        check_model_section(load_run(path, ["model.tokenizer=nowhere"]).config)


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
@pytest.mark.parametrize("key", ["data.sources", "eval.data"])
def test_what_happens_to_long_documents_says_whether_anybody_chose_it(tmp_path: Path, key: str, policy: str) -> None:
    path = run_file(tmp_path)
    more = [f"eval.data=[{make_chats(tmp_path / 'more.jsonl', seed=1)}]"] if key == "eval.data" else []

    def report(*overrides: str) -> str:
        loaded = load_run(path, [*more, *overrides]).config
        prepare_sources(loaded, lambda text: None)
        view = training_view(loaded)
        view = evaluation_view(loaded, view) or view
        return str(view.overlong)

    assert report("data.seq_len=150").startswith("overlong (truncate (default of data.overlong) at 150): ")
    assert report("data.seq_len=150", f"data.overlong={policy}").startswith(f"overlong ({policy} at 150): ")
    assert report("data.seq_len=1000", "data.slots=1000").startswith("overlong (truncate at 1000): 0 of")


def test_where_nothing_is_left_to_train_on_the_advice_names_the_folder(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    made = shards(tmp_path, tmp_path / "tokenizer")
    with pytest.raises(UserError, match=f"`headway data inspect {re.escape(str(made))} --show 3`"):
        training_view(load_run(path, [f"data.sources=[{made}]", "data.seq_len=3"]).config)
