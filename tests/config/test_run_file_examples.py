"""The examples load, without a warning, and say what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config.load import load_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_load_without_a_warning(path: Path) -> None:
    assert load_run(path).warnings == ()


def test_the_three_examples_are_there() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} >= {"sft.yaml", "pretrain.yaml", "lora.yaml"}
    pretrain = load_run(EXAMPLES / "pretrain.yaml").config
    assert isinstance(pretrain.model.config, dict) and pretrain.parallel.local_ranks(0) == 8
    assert pretrain.sequences_per_step(8) == 128 and pretrain.data.sources[1].weight == 2
    lora = load_run(EXAMPLES / "lora.yaml").config
    assert lora.model.lora is not None and lora.data.labels == "last"
    assert load_run(EXAMPLES / "sft.yaml").config.data.sources[0].path == str(EXAMPLES / "chats.jsonl")
