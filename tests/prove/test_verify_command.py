"""`headway verify` on the command line: exit codes, the page, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from headway.account.errors import UserError
from headway.cli.main import main
from headway.config.load import load_run
from headway.prove.coverage import of_meaning, refuse_other_tensors, uncompared
from headway.prove.trainee import Trainee
from headway.prove.verify import verify as run_verify


def verify(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments, "--steps", "2", "--held-out", "1"])
    return int(end.value.code or 0)


def test_agreement_disagreement_and_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = str(tiny.run_file(tmp_path))
    page = tmp_path / "verify.html"
    alike = ["-c", "data.pack=none", "-c", "train.global_batch_sequences=6"]  # about the tokens of four packs
    other = ["-c", "schedule.kind=constant", "-c", "train.steps=1000", "-c", "log.every=7"]
    assert verify(run_file, *alike, *other, "--html", str(page)) == 0
    out = capsys.readouterr().out
    assert "the same training as far as compared (not train.steps, schedule.kind): every difference" in out
    assert "differs: data.pack: best_fit → none" in out
    told = [line for line in out.splitlines() if line.startswith("differs, not compared: ")]
    assert [line.split(": ")[1] for line in told] == [
        "train.steps", "train.global_batch_sequences", "schedule.kind", "log.every",
    ]  # fmt: skip
    text = page.read_text()
    assert text.count("<svg") + text.count("nothing differs") == 4 and "http" not in text  # self-contained
    assert "as far as compared" in text and text.count("<p class=bad>differs, not compared: ") == 4

    assert verify(run_file, "-c", "optim.lr=2e-3", "-c", "train.global_batch_sequences=16", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert record["same"] is False and record["verdict"] == "not the same training"
    assert [change["key"] for change in record["differences"][:2]] == [
        "train.global_batch_sequences", "optim.lr",
    ]  # fmt: skip

    assert verify(run_file, "-c", "train.global_batch_sequences=16", "--json") == 3
    record = json.loads(capsys.readouterr().out)
    assert record["same"] is False and all(test["passed"] for test in record["tests"])
    assert record["not_compared"] == ["train.global_batch_sequences"]
    assert "a step of A is 4 packs of 160 slots with" in record["other_step"]
    assert "of B 16 packs of 160 slots with" in record["other_step"]

    assert verify(run_file) == 2
    assert "nothing to compare" in capsys.readouterr().err


OTHER_TENSORS: list[tuple[list[str], list[str]]] = [
    ([], ["model.lora.rank=4"]),
    (["model.lora.rank=4"], []),
    (["model.lora.rank=4"], ["model.lora.rank=8"]),
    (["model.lora.targets=[q_proj]"], ["model.lora.targets=[q_proj, v_proj]"]),
    ([], ["model.config.intermediate_size=96"]),
    ([], ["model.config.num_hidden_layers=1"]),
    ([], ["model.config.tie_word_embeddings=false"]),
]


def test_other_tensors_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    path = tiny.run_file(tmp_path)
    for left, right in OTHER_TENSORS:
        a, b = (load_run(path, overrides).config for overrides in (left, right))
        with pytest.raises(UserError, match="trained tensors differ in name or shape") as told:
            run_verify(a, b, tmp_path / "scratch", say=lambda text: pytest.fail(text))
        assert told.value.exit_code == 2 and "\n" not in str(told.value)
    refuse_other_tensors(load_run(path).config, load_run(path, ["model.config.rms_norm_eps=1e-5"]).config)


def test_a_model_that_only_shows_its_other_tensors_when_built_is_refused_too(tmp_path: Path) -> None:
    class Frozen(Trainee):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            next(self.module.parameters()).requires_grad_(False)

    config = load_run(tiny.run_file(tmp_path)).config
    with pytest.raises(UserError, match=r"1 trained tensors differ .* A trains one of \[320, 32\] and B none"):
        run_verify(config, config, tmp_path / "scratch", steps=1, held_out=1, say=lambda text: None, make_b=Frozen)


UNCOMPARED = {
    "train.steps=7": True, "seed=7": True, "schedule.warmup=1": True, "guard.spikes=off": None,
    "model.lora.dropout=0.1": True, "model.config.attention_dropout=0.1": True,
    "schedule.decay=0.3": False, "log.every=3": False, "data.prefetch=7": False, "parallel.ranks=2": False,
    "train.global_batch_tokens=320": False,
}  # fmt: skip
COMPARED = ["optim.lr=1", "model.dtype=bfloat16", "train.loss.z_loss=1", "train.compile=true", "data.rows=3"]


BARE = """
model: {config: {model_type: llama}, tokenizer: t, lora: {rank: 4}}
data: {sources: [a.jsonl], seq_len: 32}
train: {steps: 60}
optim: {lr: 1e-3}
"""


@pytest.mark.parametrize("change", [*UNCOMPARED, *COMPARED])
def test_every_key_is_compared_or_named_as_not_compared(tmp_path: Path, change: str) -> None:
    """And only what makes another training of it stands in the verdict: no decay without wsd, no log."""
    path = tmp_path / "run.yaml"
    path.write_text(BARE)
    a, b = load_run(path).config, load_run(path, [change]).config
    found = uncompared(a, b)
    assert [each.key for each in found] == ([change.split("=")[0]] if change in UNCOMPARED else [])
    if UNCOMPARED.get(change) is not None:
        assert bool(of_meaning(found, a, b)) is UNCOMPARED[change]
