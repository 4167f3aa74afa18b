"""`headway bench speed`: the list of documents, the check that names who is wrong, and a small race end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiny
from bench.forked import Forked
from headway.account.errors import UserError
from headway.bench.speed import SpeedOptions, bench_speed, differences
from headway.bench.speed_documents import choose, short_ones
from headway.bench.speed_table import fall_of, lines, ratios, record
from headway.config.load import load_run
from headway.data.store import ShardFolder
from headway.data.view import View
from headway.train.data import prepare_sources, training_view


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk: every contestant must start from the same weights."""
    tmp_path = tmp_path_factory.mktemp("speed")
    made = tiny.run_file(tmp_path)
    from headway.model.load import load_model

    model = load_model(config=tiny.config(), seed=1)
    model.save_pretrained(tmp_path / "model")
    text = made.read_text()
    import yaml

    raw = yaml.safe_load(text)
    raw["model"] = {"path": str(tmp_path / "model"), "tokenizer": raw["model"]["tokenizer"]}
    made.write_text(yaml.safe_dump(raw))
    return made


@pytest.fixture(scope="module")
def view(run_file: Path) -> View:
    config = load_run(run_file).config
    prepare_sources(config, lambda text: None)
    return training_view(config)


def test_chosen_documents_stand_for_all_lengths(view: View) -> None:
    chosen = choose(view, 20, seed=3)
    lengths = view.pieces.length
    assert abs(chosen.lengths.mean() - lengths.mean()) < 0.1 * lengths.mean()
    assert chosen.lengths.max() >= np.quantile(lengths, 0.9)
    assert chosen.tokens == chosen.lengths.sum()


def test_shards_hold_exactly_the_chosen_documents(view: View, tmp_path: Path) -> None:
    chosen = choose(view, 9, seed=0)
    chosen.write_shards(tmp_path / "chosen", 320)
    store = ShardFolder.open(tmp_path / "chosen")
    store.verify()
    assert store.lengths.tolist() == chosen.lengths.tolist()
    assert int(store.trained.sum()) == chosen.trained
    assert np.concatenate([store.tokens(d) for d in range(9)]).tolist() == chosen.ids.tolist()


def test_more_documents_than_there_are_is_said(view: View) -> None:
    with pytest.raises(UserError, match="lower --documents"):
        choose(view, 10_000, seed=0)


def test_the_check_needs_two_documents_at_least(view: View) -> None:
    chosen = choose(view, 20, seed=3)
    assert len(short_ones(chosen, 6, longest=0)) >= 2


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"nll": 100.5, "trained": 20}, "documents leak"),
        ({"nll": 100.0, "trained": 21}, "trains 21 tokens"),
        ({"nll": float("nan"), "trained": 20}, "documents leak"),
    ],
)
def test_a_wrong_contestant_is_named(found: dict[str, float], problem: str) -> None:
    expected = {"nll": 100.0, "trained": 20}
    assert problem in differences(found, expected, 1e-4)[0]
    assert not differences({"nll": 100.000001, "trained": 20}, expected, 1e-4)


def test_a_leaking_pack_is_off_by_more_than_the_tolerance(view: View) -> None:
    """Plant: the check's documents as one document, as a trainer without boundaries would train them."""
    import torch

    from headway.model.load import load_model

    model = load_model(config=tiny.config(), seed=1, attention="sdpa").eval()
    chosen = choose(view, 6, seed=0)
    spans = list(zip(chosen.offsets[:-1].tolist(), chosen.offsets[1:].tolist(), strict=True))

    def nll(a: int, b: int) -> float:
        ids = torch.from_numpy(chosen.ids[a:b]).long()
        labels = torch.where(torch.from_numpy(chosen.mask[a:b]).bool(), ids, -100)[1:]
        logits = model(input_ids=ids.view(1, -1), use_cache=False).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))

    with torch.no_grad():
        alone = sum(nll(*span) for span in spans)
        joined = nll(0, len(chosen.ids))
    expected = {"nll": alone, "trained": chosen.trained}
    assert differences({"nll": joined, "trained": chosen.trained}, expected, 1e-4)


def start(command: list[str], **options: Any) -> Any:
    """One contestant in an interpreter of its own, as the bench starts them; the others are forked, seconds sooner."""
    made = subprocess.Popen if command[-1].endswith("naive.json") else Forked
    return made(command, **options)


def test_a_race_of_both_presets(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr("headway.bench.speed_process.subprocess", started)
    options = SpeedOptions(documents=16, rounds=1, threads=1, warm_up=False)
    result = bench_speed(run_file, options, tmp_path / "race", lambda text: None)
    naive, fast = result.contestants
    assert not naive.wrong and not fast.wrong
    assert naive.rounds[0].tokens == fast.rounds[0].tokens == result.documents.tokens
    assert naive.rounds[0].slots > fast.rounds[0].slots > 0
    low, middle, high = ratios(fast, naive)
    assert low == middle == high > 0
    text = "\n".join(lines(result))
    assert "fast over" in text and "naive: where the time of 1 rounds went" in text
    assert record(result)["contestants"][1]["name"] == "fast"
    assert abs(sum(row.share for row in fall_of(fast)[0].rows[1:]) - 1) < 1e-6


def test_an_interpreter_that_is_not_there_is_said(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such interpreter"):
        bench_speed(run_file, SpeedOptions(peers=("hf",), peer_python="/no/python"), tmp_path / "r", lambda text: None)


def test_the_peer_script_needs_no_headway() -> None:
    """It runs under another interpreter: importing it must not import headway."""
    file = Path(__file__).parents[2] / "src/headway/bench/speed_peer.py"
    code = (
        f"import runpy, sys; runpy.run_path({str(file)!r}); sys.exit(any(m.startswith('headway') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
