"""YAML as people mean it, and what is refused before any key is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.config.load import load_run
from run_files import LEAST, config, load, refusal


@pytest.mark.parametrize(
    ("written", "meant"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), ("1.0e-5", 1e-5), (".5", 0.5), ("1", 1.0), ("1_0", 10.0), ("'1e-5'", 1e-5)],
)
def test_numbers_are_numbers(written: str, meant: float) -> None:
    assert config(text=LEAST.replace("1e-5", written)).optim.lr == meant
    assert config(f"optim.lr={written}").optim.lr == meant


@pytest.mark.parametrize(("written", "meant"), [("2_000", 2000), ("1e4", 10000), ("010", 10), ("0x10", 16)])
def test_whole_numbers_are_whole_numbers(written: str, meant: int) -> None:
    value = config(f"train.steps={written}").train.steps
    assert value == meant and type(value) is int


@pytest.mark.parametrize(
    ("written", "meant"),
    [("no", False), ("off", False), ("false", False), ("False", False), ("yes", True), ("on", True), ("true", True)],
)
def test_truth_values_in_every_spelling(written: str, meant: bool) -> None:
    assert config(f"deterministic={written}").deterministic is meant
    assert config(text=LEAST + f"deterministic: {written}\n").deterministic is meant


@pytest.mark.parametrize("name", ["no", "0012", "1e5", "12:30", "2024-01-01", "0x1F", "true"])
def test_text_stays_the_characters_that_were_written(name: str) -> None:
    # YAML 1.1 reads these as false, 10, 100000.0 (or text), 750, a date, 31 and true.
    assert config(f"name={name}").name == name
    assert config(text=LEAST + f"name: {name}\n").name == name


def test_inline_model_config_uses_the_same_rules() -> None:
    text = LEAST.replace("path: ./m", "config: {model_type: llama, eps: 1e-5, act: no, size: 1_024, tied: true, no: x}")
    inline = config(text=text).model.config
    assert isinstance(inline, dict) and type(inline["size"]) is int and type(inline["tied"]) is bool
    assert inline == {
        "model_type": "llama", "eps": 1e-5, "act": "no", "size": 1024, "tied": True, "no": "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml: the run file is empty"),
        ("# only a comment\n", "run.yaml: the run file is empty"),
        ("[a, b]", "run.yaml:1: a mapping of keys is expected here: version, name"),
        ("just text", "run.yaml:1: a mapping of keys is expected here"),
        ("model:\n\tpath: x\n", "run.yaml:2: not valid YAML: while scanning for the next token found character '\\t'"),
        ("a: [1, 2\n", "run.yaml:2: not valid YAML"),
        (LEAST + "---\n" + LEAST, "run.yaml:8: not valid YAML: expected a single document"),
        (LEAST + "name: a\x00b\n", "run.yaml:8: character 0x0 is not allowed in YAML"),
        (LEAST + "seed: 1\nseed: 2\n", "run.yaml:9: the key 'seed' is given twice (first on line 8)"),
        (LEAST.replace("128", "128\n  seq_len: 64"), "run.yaml:5: the key 'seq_len' is given twice (first on line 4)"),
        (
            LEAST.replace("path: ./m", "config: {model_type: llama, a: 1, a: 2}"),
            "run.yaml:1: the key 'a' is given twice",
        ),
        (LEAST + "? [a]\n: 1\n", "run.yaml:8: a key must be a plain name"),
        (LEAST + "name: *nobody\n", "run.yaml:8: not valid YAML: found undefined alias 'nobody'"),
        (LEAST.replace("[a.jsonl]", "&a [*a]"), "run.yaml:3: data.sources[0]: an alias inside its own anchor"),
        (
            LEAST.replace("path: ./m", "config: !!python/object:os.system {a: 1}"),
            "run.yaml:1: model.config: the tag tag:yaml.org,2002:python/object:os.system is not allowed",
        ),
        (LEAST.replace("1e-5", "!!binary aGk="), "run.yaml:7: optim.lr: the tag !!binary is not allowed in a run file"),
        ("a: " + "[" * 5000, "run.yaml:1: nested too deeply to be a run file"),
        (LEAST.replace("128", "9" * 5000), "run.yaml:4: data.seq_len:"),
    ],
)  # fmt: skip
def test_what_is_no_run_file_is_refused_with_its_line(text: str, message: str) -> None:
    assert refusal(text=text).startswith(message)


def test_duplicate_keys_are_what_plain_pyyaml_lets_through() -> None:
    import yaml

    planted = LEAST.replace("  seq_len: 128", "  seq_len: 128\n  seq_len: 64")
    assert yaml.safe_load(planted)["data"]["seq_len"] == 64  # the fault: the first value vanishes without a word
    assert "given twice" in refusal(text=planted)


def test_a_handful_of_aliases_that_mean_billions_of_values_is_refused() -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
    bomb = "{model_type: llama, l0: &l0 [0, 0], " + ", ".join(levels) + "}"
    assert "more than 100000 values" in refusal(text=LEAST.replace("path: ./m", f"config: {bomb}"))


def test_an_anchor_can_be_used_elsewhere() -> None:
    text = LEAST.replace("[a.jsonl]", "&s [a.jsonl]") + "eval:\n  data: *s\n  every: 5\n"
    run = config(text=text)
    assert run.eval.data == run.data.sources


def test_an_emptied_section_is_an_absent_one() -> None:
    assert config(text=LEAST + "log:\n  # every: 3\n") == config()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, binary, latin = tmp_path / "missing.yaml", tmp_path / "b.yaml", tmp_path / "latin.yaml"
    binary.write_bytes(LEAST.encode("utf-16"))
    latin.write_bytes(b"name: caf\xe9\n")
    for path, message in (
        (missing, "there is no such run file"),
        (tmp_path, "this is a folder; give the run file in it"),
        (binary, "not UTF-8 (byte 0)"),
        (latin, "not UTF-8 (byte 9)"),
    ):
        with pytest.raises(UserError) as caught:
            load_run(path)
        assert str(caught.value).startswith(f"{path}: {message}")


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "win.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + LEAST.replace("\n", "\r\n").encode())
    run = load_run(path)
    assert run.config.data.seq_len == 128 and run.config.name == "win"
    assert str(run.provenance.of("data.seq_len")) == f"{path}:4"


def test_json_is_yaml_too() -> None:
    text = '{"model": {"path": "/m"}, "data": {"sources": ["/a"], "seq_len": 8}, "train": {"steps": 9}, "optim":'
    assert load(text=text + ' {"lr": 1e-5}}').config.optim.lr == 1e-5
