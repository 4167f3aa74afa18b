"""`headway tune`: the order of remedies, keeping and putting back, the written file, and the naive preset end to end."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import tiny
from headway.account.account import Account
from headway.account.errors import UserError
from headway.account.events import Flops
from headway.account.remedy import Remedy
from headway.account.tree import STEP
from headway.cli.main import main
from headway.config.load import load_run
from headway.config.run import RunConfig
from headway.guard.memory import SHARED_MEMORY
from headway.prove.verify import verify
from headway.train.data import prepare_sources
from headway.train.reporter import Reporter
from headway.train.run import Run
from headway.train.step import Learner
from headway.tune.precision import LayerError, measure_layers, precision_lines, proposed
from headway.tune.profile import Profile, decided, profile
from headway.tune.registry import DATA, larger_micro_batch, pack, ranked
from headway.tune.rounds import PROVED, Round, State, Tuned, _try, beside, changed, table, tune
from headway.tune.write import Setting, as_overrides, given, own_name, tuned_path, tuned_text, why_not_the_same


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.run_file(tmp_path_factory.mktemp("tune"), train={"steps": 200})
    raw = yaml.safe_load(made.read_text())
    del raw["train"]["global_batch_sequences"], raw["data"]["slots"]
    made.write_text(yaml.safe_dump(raw))
    prepare_sources(load_run(made).config, lambda text: None)
    return made


def naive(run_file: Path) -> RunConfig:
    return load_run(run_file, ["preset=naive", "data.rows=4", "train.global_batch_sequences=16"]).config


def pretended(config: RunConfig, rival: Profile | None = None) -> Profile:
    """A machine by formula: time is slots, a third more for recompute, and a fixed cost a micro-batch. No clock."""
    tokens = 10_000
    slots = tokens if config.data.packed else 3 * tokens
    micro = slots / (config.data.slots if config.data.packed else config.data.rows * 100)
    compute = (
        slots
        * (4 / 3 if config.model.recompute == "full" else 1)
        * (0.8 if getattr(config.model, "fuse", None) == "auto" else 1)
    )
    if config.train.compile:
        compute *= 1.2
    wall = round(1e3 * (compute + 400 * micro))
    parts = {"compute.forward": int(wall * 0.3), "compute.loss": int(wall * 0.2), "compute.backward": int(wall * 0.4)}
    useful = 100 * tokens
    flops = Flops(
        useful=useful,
        padding=100 * slots - useful,
        recompute=33 * slots if config.model.recompute == "full" else 0,
    )
    return Profile(Account.close(STEP, wall, parts), flops, slots, tokens, 16, wall / 1e9, None)


def same(before: RunConfig, after: RunConfig) -> str | None:
    return None


def run_tune(
    config: RunConfig, check: Callable[[RunConfig, RunConfig], str | None] = same
) -> tuple[list[Round], RunConfig]:
    found = tune(config, pretended, check, lambda done: None)
    return found.rounds, found.config


def test_the_naive_preset_is_mended_by_itself(run_file: Path) -> None:
    rounds, config = run_tune(naive(run_file))
    kept = {each.remedy.name for each in rounds if each.kept}
    assert kept >= {"pack", "less-recompute", "larger-micro-batch", "fuse-loss"}
    assert config.data.packed and config.model.recompute == "auto"
    by_hand = changed(load_run(run_file, ["preset=fast"]).config, {"data.slots": config.data.slots})
    assert pretended(config).speed >= 0.9 * pretended(by_hand).speed


def test_what_was_found_is_held_against_a_preset_in_turn(run_file: Path) -> None:
    found = tune(naive(run_file), pretended, same, lambda done: None)
    seen: list[RunConfig] = []

    def measure(config: RunConfig, rival: Profile | None) -> Profile:
        seen.append(config)
        return pretended(config)

    shares = beside(found, load_run(run_file, ["preset=fast"]).config, measure)
    assert len(shares) == 2 and min(shares) >= 0.9
    assert [config is found.config for config in seen] == [True, False] * 2
    assert {(config.data.slots, config.sequences_per_step(1)) for config in seen} == {
        (found.config.data.slots, found.config.sequences_per_step(1))
    }
    slow = beside(
        found, found.config, lambda config, _: pretended(naive(run_file) if config is found.config else config)
    )
    assert max(slow) < 0.9, "a configuration that is slower shows"


def test_data_remedies_come_before_compute_remedies(run_file: Path) -> None:
    config = naive(run_file)
    names = [remedy.name for remedy in ranked(config, pretended(config))]
    assert names[0] == "pack" and len(names) > 2
    assert {maker.__name__ for maker in DATA} == {"pack", "prefetch"}


def test_what_gains_nothing_is_put_back(run_file: Path) -> None:
    rounds, config = run_tune(naive(run_file))
    compiled = next(each for each in rounds if each.remedy.name == "compile")
    assert not compiled.kept and compiled.measured is not None and compiled.measured < 0
    assert config.train.compile is False


def test_a_change_of_the_training_is_put_back(run_file: Path) -> None:
    def refuse(before: RunConfig, after: RunConfig) -> str | None:
        return "not the same training" if after.data.packed and not before.data.packed else None

    rounds, config = run_tune(naive(run_file), refuse)
    assert not config.data.packed
    assert [each.verdict for each in rounds if each.remedy.name == "pack"] == ["put back: not the same training"]
    again = [each for each in rounds if each.kept]
    assert {each.remedy.name for each in again} >= {"less-recompute", "fuse-loss"}, "tuning goes on without it"
    assert {each.verdict for each in again} == {PROVED}


@pytest.mark.parametrize(("packs", "times"), [(1, []), (2, [2]), (3, [3]), (4, [4, 2]), (5, [5]), (6, [2]), (7, [])])
def test_a_larger_micro_batch_leaves_the_tokens_of_a_step(run_file: Path, packs: int, times: list[int]) -> None:
    config = changed(
        naive(run_file), {"data.pack": "best_fit", "data.slots": 256, "train.global_batch_sequences": packs}
    )
    found = larger_micro_batch(config, pretended(config))
    made = [changed(config, dict(remedy.change)) for remedy in found]
    assert [each.data.slots // 256 for each in made] == times
    assert all(each.data.slots * each.sequences_per_step(1) == 256 * packs for each in made)


@pytest.mark.parametrize(
    ("rows", "at_once", "per_row"), [(16, 4, 60), (2, 2, 60), (8, 8, 20), (5, 2, 100), (64, 8, 31)]
)
def test_packs_hold_the_tokens_that_the_rows_of_a_step_held(
    run_file: Path, rows: int, at_once: int, per_row: int
) -> None:
    config = changed(naive(run_file), {"data.rows": at_once, "train.global_batch_sequences": rows})
    seen = replace(pretended(config), tokens=rows * per_row, documents=rows, slots=rows * 128)
    remedy = pack(config, seen)
    if rows * per_row < 0.9 * 128:
        assert remedy is None, f"one pack of 128 slots is more than {rows * per_row} tokens"
        return
    assert remedy is not None
    made = changed(config, dict(remedy.change))
    assert rows * per_row <= made.data.slots * made.sequences_per_step(1) <= 1.25 * rows * per_row


@pytest.mark.parametrize("culprit", ["model.recompute", "model.fuse", "data.slots"])
def test_what_is_kept_is_proved_once_and_halving_finds_the_change_at_fault(run_file: Path, culprit: str) -> None:
    own = naive(run_file)
    checks: list[tuple[RunConfig, RunConfig]] = []

    def check(before: RunConfig, after: RunConfig) -> str | None:
        checks.append((before, after))
        section, name = culprit.split(".")
        wrong = getattr(getattr(after, section), name) not in (getattr(getattr(own, section), name), 128)
        return "planted" if wrong else None

    found = tune(own, pretended, check, lambda done: None)
    bad = [each for each in found.rounds if each.verdict == "put back: planted"]
    assert bad and all(culprit in each.remedy.change and not each.kept for each in bad)
    assert all(before == own for before, _ in checks), "always against the user's own"
    assert check(own, found.config) is None and all(each.verdict == PROVED for each in found.kept)
    proved = [str(after) for _, after in checks[:-1]]
    assert len(proved) == len(set(proved)), "nothing is proved twice"
    rows = [(each.remedy, each.measured) for each in found.rounds]
    assert all(rows.count(row) == 1 for row in rows), "nothing is told twice"
    checks.clear()
    run_tune(own, lambda before, after: checks.append((before, after)))
    assert len(checks) == 1, "three trainings for the proof, however many changes"


def test_a_clear_trial_ends_early_and_an_unclear_one_goes_on() -> None:
    def after(steps: int, tokens: int, seconds: float, rival: float | None, most: float = float("inf")) -> bool:
        one = SimpleNamespace(tokens=tokens / steps, wall_ns=seconds / steps * 1e9)
        return decided([one] * steps, rival, most)  # type: ignore[list-item]

    assert not after(1, 3000, 3.0, 500.0), "one step says too little"
    assert after(2, 3000, 3.0, 500.0) and after(2, 900, 3.0, 500.0)
    assert not after(2, 1620, 3.0, 500.0) and not after(9, 3000, 3.0, None)
    assert not after(9, 180, 0.18, 500.0), "nine steps of 20 ms save nothing"
    assert after(2, 540, 61.0, 500.0, 60.0)


@pytest.mark.parametrize(("in_flight", "made"), [(0, 3), (1, 4)])
def test_steps_that_the_device_still_works_on_are_no_speed(
    in_flight: int, made: int, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU two launched steps stood over the time of one: every trial looked twice as fast, and ended there."""
    calls: list[None] = []
    once = Run.learn

    def learn(self: Run, fed: Any) -> None:
        calls.append(None)
        once(self, fed)

    monkeypatch.setattr(Run, "learn", learn)
    monkeypatch.setattr(Run, "tell_finished_steps", lambda self: self.reporter.tell_finished(in_flight))
    monkeypatch.setattr("headway.tune.profile.LEAST_SECONDS", 0.0)
    config = load_run(run_file).config
    found = profile(config, tmp_path, steps=9, rival=replace(pretended(config), seconds=1e12))
    assert len(calls) == made and found.documents > 0  # the warm-up, the two that are told, what was in flight


@pytest.mark.parametrize(
    "error",
    [UserError("no memory for it"), torch.OutOfMemoryError("CUDA out of memory."), MemoryError()],
    ids=["refused", "on the device", "on the host"],
)
def test_a_configuration_that_does_not_run_is_put_back(error: Exception, run_file: Path) -> None:
    """On a GPU memory ends in words of its own, outside of forward and backward too: all rounds were lost."""

    def measure(config: RunConfig, rival: Profile | None) -> Profile:
        if config.model.recompute == "auto":
            raise error
        return pretended(config)

    found = tune(naive(run_file), measure, same, lambda done: None)
    refused = [each for each in found.rounds if each.remedy.name == "less-recompute"]
    assert [(each.kept, each.measured) for each in refused] == [(False, None)]
    assert ("no memory for it" if isinstance(error, UserError) else "does not fit into memory") in "\n".join(
        table(found)
    )

    def check(before: RunConfig, after: RunConfig) -> str | None:
        if after.data.packed:
            raise error
        return None

    unproved = tune(naive(run_file), pretended, check, lambda done: None)
    assert not unproved.config.data.packed and any("not proven" in each.verdict for each in unproved.rounds)


def test_what_no_configuration_is_at_fault_for_ends_tuning(run_file: Path) -> None:
    def measure(config: RunConfig, rival: Profile | None) -> Profile:
        if rival is not None:
            raise RuntimeError("shapes do not match")
        return pretended(config)

    with pytest.raises(RuntimeError, match="shapes do not match"):
        tune(naive(run_file), measure, same, lambda done: None)


def test_what_auto_leaves_as_it_was_changes_nothing_and_is_not_measured(run_file: Path, tmp_path: Path) -> None:
    """`compile: auto` that decides off, for so few steps of the whole run: it was kept for +36 %, all of it noise."""
    own = load_run(run_file, ["train.compile=false", "model.recompute=none", "train.steps=60"]).config
    folders = (tmp_path / str(number) for number in range(10))

    def measure(config: RunConfig, rival: Profile | None) -> Profile:
        return profile(config, next(folders), steps=1, rival=rival)

    before = measure(own, None)
    for change in ({"train.compile": "auto"}, {"model.recompute": "auto"}):
        remedy = Remedy("compile", (), (0.0, 0.1), ("",), change, "")
        done, state = _try(Tuned([State(own, before)]), remedy, measure, measure)
        assert state is None and not done.kept and done.measured is None
        words = "compile: off, 60 steps could win back" if "train.compile" in change else "recompute none"
        assert done.verdict.startswith(f"changes nothing here: {words}")


def test_a_gain_within_the_spread_of_the_steps_is_put_back(run_file: Path) -> None:
    own = naive(run_file)
    remedy = Remedy("fuse-loss", (), (0.0, 0.1), ("",), {"model.fuse": "auto"}, "")

    def tried(left: list[float], right: list[float], tokens: int = 100) -> Round:
        before, after = (
            replace(pretended(own), steps=steps, tokens=sum(n for n, _ in steps), seconds=sum(s for _, s in steps))
            for steps in (tuple((100, s) for s in left), tuple((tokens, s) for s in right))
        )
        return _try(Tuned([State(own, before)]), remedy, lambda *_: after, lambda *_: before)[0]

    assert tried([1.0] * 8, [0.9] * 8).kept, "steady steps show 11 %"
    noisy = tried([1.0, 1.5, 0.8, 1.3] * 2, [0.9, 0.8, 1.4, 1.0] * 2)
    assert not noisy.kept and noisy.measured is not None and 0.01 < noisy.measured < noisy.spread
    assert noisy.verdict == "put back: gains no more than single steps differ by" and "±" in noisy.gain
    uneven = [0.5, 1.0, 2.0, 4.0] * 2  # of other documents each, the same on both sides: not the machine's noise
    assert tried(uneven, [0.9 * each for each in uneven]).kept
    assert not tried(uneven, [0.9 * each for each in uneven], tokens=101).kept, "other documents: nothing is known"
    assert tried([1.0, 1.1] * 4, [0.3, 0.33] * 4, tokens=110).kept


def test_a_machine_that_grows_quieter_wins_for_no_change(run_file: Path) -> None:
    """Before every measurement but the first the machine is twice as fast: whatever came next was kept for +100 %."""
    seen: list[RunConfig] = []

    def measure(config: RunConfig, rival: Profile | None) -> Profile:
        seen.append(config)
        made = pretended(load_run(run_file).config)
        return made if len(seen) == 1 else replace(made, seconds=made.seconds / 2)

    found = tune(naive(run_file), measure, same, lambda done: None)
    assert not found.kept and found.speedup == 1
    assert found.rounds[0].measured == 0 and found.rounds[0].verdict == "put back: gains too little"
    assert seen.count(found.config) == 2, "as it is, and again after the first that won"


TEXT = """\
# mine
model: {path: ./m}
data:
  sources: [a.jsonl]  # these
  seq_len: 128
train:
  steps: 100
optim: {lr: 1e-5}
"""


def test_the_written_file_is_the_users_text_with_comments(tmp_path: Path) -> None:
    changes = [
        ("data.pack", "best_fit", "pack, +200 %"),
        ("data.seq_len", 256, "longer"),
        ("model.recompute", "auto", "no recompute"),
        ("train.global_batch_sequences", 3, "packs"),
        ("log.every", 2, "a section that was not there"),
    ]
    text = tuned_text(TEXT, [Setting(key, value, f"tuned: {comment}") for key, value, comment in changes])
    (tmp_path / "run.yaml").write_text(text)
    config = load_run(tmp_path / "run.yaml").config
    assert (config.data.pack, config.data.seq_len, config.model.recompute) == ("best_fit", 256, "auto")
    assert (config.train.global_batch_sequences, config.log.every, config.train.steps) == (3, 2, 100)
    assert text.startswith("# mine\n") and "sources: [a.jsonl]  # these" in text
    assert all(f"# tuned: {comment}" in text for _, _, comment in changes)


ROWS = "{sources: [a.jsonl], seq_len: 128, rows: 4}"
COMMON = f"model: {{path: ./m}}\ndata: {ROWS}\noptim: {{lr: 1e-5}}\n"
SHAPES = {
    "README": COMMON + "train:\n  epochs: 3\n  # mine\n  global_batch_tokens: 2048  # why\n  precision: float32\n",
    "last key, no newline": COMMON + "train:\n  epochs: 3\n  global_batch_tokens: 2048",
    "flow section": COMMON + "train: {epochs: 3, global_batch_tokens: 2048}\n",
    "flow section, first": COMMON + "train: {global_batch_tokens: 2048, epochs: 3}\n",
    "a file in braces": f"{{model: {{path: ./m}}, data: {ROWS}, optim: {{lr: 1e-5}}, train: {{epochs: 3}}, log: }}",
    "JSON": """{"model": {"path": "./m"}, "data": {"sources": ["a.jsonl"], "seq_len": 128, "rows": 4},
 "train": {"epochs": 3, "global_batch_tokens": 2048}, "optim": {"lr": 1e-5}}""",
    "ends in ...": COMMON + "...\n",
    "no train, indented": "".join(f"  {line}\n" for line in COMMON.splitlines()),
    "an empty train": COMMON + "train:  # nothing\n\nlog: ~",
    "marked": "\ufeff" + COMMON + "train: {epochs: 3}",
    "lists": "model: {path: ./m}\ndata:\n  sources:\n    - a.jsonl\n  # of data\n  seq_len: 128\n  rows: 4\n",
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_written_file_is_what_was_proved_however_the_run_file_is_written(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SHAPES[shape], encoding="utf-8")
    overrides = ["preset=naive", "data.rows=2", "data.sources=[b.jsonl]", "optim.lr=2e-5", "log.every=3"]
    overrides += ["train.steps=7", "name='001'"]
    change = {"data.pack": "best_fit", "data.slots": 512, "train.global_batch_sequences": 3, "model.recompute": "auto"}
    proved = changed(load_run(path, overrides).config, change)
    settings = [*given(overrides, Path.cwd()), *(Setting(key, value, "won\nmuch") for key, value in change.items())]
    settings.append(own_name(proved))
    text = "# head\n" + tuned_text(path.read_text(encoding="utf-8"), settings)
    assert why_not_the_same(text, proved, path) == "", text
    assert text.count("# from the command line") == len(overrides)
    assert load_run(path, as_overrides(settings)).config == proved.model_copy(update={"name": "001.tuned"})
    assert ("global_batch_tokens: 2048" in text.replace('"', "")) == ("2048" in SHAPES[shape]), "nothing is lost"
    assert all(f"# {words}" in text for words in ("mine", "of data", "nothing") if f"# {words}" in SHAPES[shape])


def test_overrides_for_the_command_line_keep_one_of_those_that_exclude_each_other() -> None:
    settings = given(["train.global_batch_tokens=4096", "data.rows=2"], Path.cwd())
    assert as_overrides([*settings, Setting("train.global_batch_sequences", 3, ""), Setting("data.rows", 4, "")]) == [
        "train.global_batch_sequences=3",
        "data.rows=4",
    ]


def test_a_profile_of_the_real_thing_and_its_proof(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = naive(run_file)
    shared_memory = tmp_path / "shm"
    shared_memory.mkdir()
    monkeypatch.setenv(SHARED_MEMORY, str(shared_memory))
    handlers = []
    learn = Learner.learn

    def learning(self: Learner, *arguments: Any) -> Any:
        handlers.append(tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)))
        return learn(self, *arguments)

    monkeypatch.setattr(Learner, "learn", learning)
    seen = profile(config, tmp_path / "a", steps=2)
    assert 0.1 < seen.padding < 0.9 and seen.flops.recompute > 0 and seen.account.share("compute") > 0.3
    packed = changed(config, dict(ranked(config, seen)[0].change))
    after = profile(packed, tmp_path / "b", steps=2, rival=seen)
    assert after.padding < seen.padding
    assert 0.5 < (after.tokens / 2) / (seen.tokens / 2) < 2  # about the same documents a step
    assert verify(config, packed, tmp_path / "v", steps=2, held_out=1, say=lambda text: None).verdict.same
    usual = tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
    assert len(handlers) == 3 + 3 + 3 * 2 and set(handlers) == {usual}, "Ctrl-C ends the command, not the next save"
    assert not list(shared_memory.iterdir()), "every trial left a claim on memory checkpoints in /dev/shm"


@pytest.mark.parametrize(("compiling", "counted"), [({1}, 2), (set(range(9)), 4)], ids=["another bucket", "a storm"])
def test_a_step_in_which_something_is_compiled_does_not_count_unless_all_are(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiling: set[int], counted: int
) -> None:
    number = itertools.count()
    monkeypatch.setattr(Reporter, "_recompiles", lambda self: int(next(number) in compiling))
    config = load_run(run_file, ["data.pack=none", "data.rows=1", "train.global_batch_sequences=2"]).config
    seen = profile(config, tmp_path, steps=2)
    assert (next(number), seen.documents) == (5, 2 * counted)


def test_precision_names_the_module_that_errs(run_file: Path, tmp_path: Path) -> None:
    found = measure_layers(load_run(run_file).config, tmp_path)
    assert found.tokens > 0 and len(found.errors) > 10
    assert all(0 <= each.error < 0.1 for each in found.errors)
    assert any(line.startswith("train.sensitive: ") for line in precision_lines(found))


def test_precision_proposes_outliers_and_groups_them() -> None:
    errors = [LayerError(f"model.layers.{n}.mlp.up_proj", "Linear", 1e-3) for n in range(8)]
    errors += [LayerError(f"model.layers.{n}.mlp.down_proj", "Linear", 2e-2) for n in range(2)]
    errors += [LayerError("model.layers.0.self_attn.q_proj", "Linear", 1.0), LayerError("model.norm", "Norm", 9.0)]
    errors += [LayerError("model.layers.1.self_attn.q_proj", "Linear", 1e-3)]
    assert proposed(errors, ["*norm*"]) == ("*norm*", "*.mlp.down_proj", "model.layers.0.self_attn.q_proj")
    assert proposed([], ["*norm*"]) == ("*norm*",)


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["tune", *map(str, arguments)])
    return int(str(end.value.code)), *capsys.readouterr()


def test_what_cannot_end_well_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.run_file(tmp_path)
    monkeypatch.setattr("headway.train.data.prepare_sources", lambda *_: pytest.fail("the work began"))
    code, _, said = command(capsys, path, "train.precision=float8_auto")
    assert code == 2 and "tune: train.precision float8_auto is decided by measuring" in said
    tuned_path(path).mkdir()
    code, _, said = command(capsys, path)
    assert code == 2 and "run.tuned.yaml is a folder" in said and "Traceback" not in said


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No training in the command: the machine by formula, and every proof holds. Overrides for it."""
    monkeypatch.setattr("headway.tune.profile.profile", lambda config, *_, **__: pretended(config))
    verdict = SimpleNamespace(verdict=SimpleNamespace(same=True))
    monkeypatch.setattr("headway.prove.verify.verify", lambda *_, **__: verdict)
    return ["preset=naive", "data.rows=4", "train.global_batch_sequences=16"]


def test_the_command_writes_a_file_that_stands_alone(
    run_file: Path, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, run_file, *quick)
    written = tuned_path(run_file)
    assert code == 0 and f"written: {written}" in out
    config = load_run(written).config
    assert (config.preset, config.data.rows, config.data.pack) == ("naive", 4, "best_fit")
    own = load_run(run_file).config
    assert config.folder == own.folder.with_name("tiny.tuned"), "beside the run of the run file, which says name: tiny"
    unnamed = run_file.with_name("other.yaml")
    unnamed.write_text(run_file.read_text().replace("name: tiny\n", ""))
    assert command(capsys, unnamed, *quick)[0] == 0
    text = tuned_path(unnamed).read_text()
    assert load_run(tuned_path(unnamed)).config.name == "other.tuned" and "\nname:" not in text
    for path in (written, tuned_path(unnamed)):
        path.unlink()


@pytest.mark.parametrize("json", [False, True])
def test_a_file_that_would_be_another_training_is_not_written_but_told(
    run_file: Path,
    quick: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    json: bool,
) -> None:
    monkeypatch.setattr("headway.tune.write._alternatives", lambda setting: [])  # the planted fault: both stay
    text = run_file.read_text()
    other = run_file.with_name("both.yaml")
    other.write_text(text.replace("train:", "train:\n  global_batch_tokens: 2048"))
    code, out, said = command(capsys, other, *quick[:2], *(["--json"] if json else []))
    assert code == 3 and "is not written" in said and "at most one of" in said and not tuned_path(other).exists()
    overrides = yaml.safe_load(out)["overrides"] if json else shlex.split(out.splitlines()[-1].split(other.name)[1])
    config = load_run(other, overrides).config
    assert (config.data.pack, config.name) == ("best_fit", "tiny.tuned") and "preset=naive" in overrides


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_in_tmp(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    def stopped(config: RunConfig, scratch: Path, **_: object) -> Profile:
        assert scratch.parent.parent == tmp_path
        signal.raise_signal(number)
        return pretended(config)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("headway.tune.profile.profile", stopped)
    former = signal.getsignal(signal.SIGTERM)
    assert command(capsys, run_file)[0] == 128 + number and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize("json", [False, True])
def test_a_full_disk_at_the_end_takes_nothing_of_what_was_measured(
    run_file: Path,
    quick: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    json: bool,
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("headway.record.files.write_atomic", full)
    code, out, said = command(capsys, run_file, *quick, *(["--json"] if json else []))
    assert code == 3 and "is not written: no space left on device" in said
    assert PROVED in out and "larger-micro-batch" in out and (not json or yaml.safe_load(out)["written"] is None)
    overrides = yaml.safe_load(out)["overrides"] if json else shlex.split(out.splitlines()[-1].split(run_file.name)[1])
    assert load_run(run_file, overrides).config.data.pack == "best_fit"


@pytest.mark.parametrize(("number", "words"), [(28, "no space left on device"), (30, "read-only file system")])
def test_a_full_or_read_only_disk_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, words: str
) -> None:
    path = tiny.run_file(tmp_path)

    def synced(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("headway.train.data.prepare_sources", lambda *_: pytest.fail("the work began"))
    monkeypatch.setattr("headway.cli.paths.os.fsync", synced)
    code, _, said = command(capsys, path)
    assert code == 2 and f"run.tuned.yaml cannot be written: {words}; tune writes" in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["chats.jsonl", "run.yaml", "tokenizer"]
