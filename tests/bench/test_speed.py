"""`headway bench speed`: the list of documents, the check that names who is wrong, and a small race end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from bench.forked import Forked
from headway.account.errors import UserError
from headway.bench import speed_peer, speed_table
from headway.bench.speed import Race, SpeedOptions, bench_speed, differences
from headway.bench.speed_documents import choose, short_ones
from headway.bench.speed_process import Contestant, Round
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


@pytest.mark.parametrize(("alone", "expected"), [(False, "a0 b0 a1 b1 a2 b2"), (True, "a0 a1 a2 b0 b1 b2")])
def test_rounds_in_turn_or_one_contestant_after_the_other(alone: bool, expected: str) -> None:
    """On a GPU both would have to fit beside one another: there the second starts when the first has ended."""
    made: list[str] = []
    alive: set[str] = set()

    class Fake(Contestant):
        def start(self) -> None:
            alive.add(self.name)
            assert len(alive) == 1 or not alone
            self.ready = {"notes": []}

        def check(self) -> dict[str, Any]:
            return {"nll": 2.0, "trained": 5}

        def round(self) -> Round:
            made.append(f"{self.name}{sum(each.startswith(self.name) for each in made)}")
            return Round(1.0, 1.0, 8, 7, 5 if self.name == "a" else 4, 1)

        def end(self) -> None:
            alive.discard(self.name)

    both = [Fake(name, [], Path("log")) for name in "ab"]
    Race({"nll": 2.0, "trained": 5}, 5, 1e-4, SpeedOptions(rounds=2), lambda text: None).all(both, alone)
    assert " ".join(made) == expected and not alive
    assert [len(each.rounds) for each in both] == [2, 2]
    assert not both[0].wrong and "trained 4 tokens in a round of 5" in both[1].wrong, "one that skips labels is named"


def test_a_peer_that_dies_is_out_and_the_race_goes_on(run_file: Path, tmp_path: Path) -> None:
    """The script ends at once (no TRL here, or no memory): hours of rounds must not be lost with it."""
    dead = Contestant("trl", [sys.executable, "-c", "import sys; sys.exit('no memory')"], tmp_path / "trl.log")
    ours = Contestant("fast", [sys.executable, "-c", _ANSWERS], tmp_path / "fast.log")
    said: list[str] = []
    race = Race({"nll": 2.0, "trained": 5}, 5, 1e-4, SpeedOptions(rounds=1), said.append)
    race.all([dead, ours], False)
    assert "trl ended with code 1: no memory" in dead.died and any(text.startswith("OUT: trl") for text in said)
    assert len(ours.rounds) == 1 and not ours.died
    result = SimpleNamespace(contestants=[dead, ours], one_by_one=False)
    assert any("out of the race: trl" in text for text in speed_table._wrong(result))  # type: ignore[arg-type]
    assert not any(text.startswith("trl") for text in speed_table._table(result))  # type: ignore[arg-type]
    own = Contestant("naive", dead.command, tmp_path / "naive.log")
    with pytest.raises(UserError, match="no memory"):
        race.all([own], False)


_ANSWERS = """
import json, sys
print(json.dumps(dict(event="ready", notes=[], versions={})), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "end":
        break
    print(json.dumps(dict(event=word, nll=2.0, trained=5, seconds=1, core_seconds=1, slots=8, tokens=7, steps=1)), flush=True)
"""


def test_a_peer_makes_the_widest_batch_that_the_memory_holds(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": load_run(run_file).config.model.path, "device": "cpu", "precision": "bf16", "dtype": "float32"}
    holds = speed_peer.Trial(settings, 16)
    inner = holds.model.forward

    def forward(input_ids: Any, **arguments: Any) -> Any:
        if input_ids.numel() > (80 if holds.model.is_gradient_checkpointing else 48):
            raise torch.OutOfMemoryError("planted")
        return inner(input_ids=input_ids, **arguments)

    monkeypatch.setattr(holds.model, "forward", forward)
    assert speed_peer.largest_fit(holds, 3) == speed_peer.Fit(3)
    found = speed_peer.largest_fit(holds, 8)
    assert (found.rows, found.recompute) == (4, True) and "4 rows at a time, 2 times a step" in str(found.note)
    assert all(parameter.grad is None for parameter in holds.model.parameters())
    with pytest.raises(SystemExit, match="one row"):
        speed_peer.largest_fit(lambda rows, recompute: False, 8)


def test_an_interpreter_that_is_not_there_is_said(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such interpreter"):
        bench_speed(run_file, SpeedOptions(peers=("hf",), peer_python="/no/python"), tmp_path / "r", lambda text: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"lora": {"rank": 4}}}, "model.lora"),
        ({"train": {"precision": "float8"}}, "train.precision is float8"),
        ({"model": {"path": None, "config": {"model_type": "llama"}}}, "model.path"),
    ],
)
def test_what_would_not_be_the_same_work_is_refused(
    run_file: Path, tmp_path: Path, change: dict[str, dict[str, Any]], said: str
) -> None:
    import yaml

    raw = yaml.safe_load(run_file.read_text())
    for section, values in change.items():
        raw[section] = {key: value for key, value in (raw[section] | values).items() if value is not None}
    other = run_file.with_name(f"{tmp_path.name}.yaml")
    other.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match=said):
        bench_speed(other, SpeedOptions(), tmp_path / "r", lambda text: None)


def test_a_peer_that_is_not_installed_is_said_before_any_work(tmp_path: Path) -> None:
    """Not after minutes of preparing and of the others' starts."""
    poor = tmp_path / "python"
    poor.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages
    poor.chmod(0o755)
    with pytest.raises(UserError, match=r"cannot run the peer trl: it lacks numpy, torch, .*trl, datasets; install"):
        bench_speed(Path("unread.yaml"), SpeedOptions(peers=("trl",), peer_python=str(poor)), tmp_path, print)
    poor.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UserError, match="a Python that runs"):
        bench_speed(Path("unread.yaml"), SpeedOptions(peers=("hf",), peer_python=str(poor)), tmp_path, print)


def test_the_peer_script_needs_no_headway() -> None:
    """It runs under another interpreter: importing it must not import headway."""
    file = Path(__file__).parents[2] / "src/headway/bench/speed_peer.py"
    code = (
        f"import runpy, sys; runpy.run_path({str(file)!r}); sys.exit(any(m.startswith('headway') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
