"""A run that was stopped goes on bit for bit, as often as it is stopped, in whatever way."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.config.optim import OptimConfig
from headway.record.folder import RunFolder
from headway.train.optim import build_optimizers
from headway.train.run import Run
from tiny import make_chats, run_file
from train.running import history, losses, run, start

STEPS = 9  # two epochs of the data, and a step

# Whole processes, several at once: on a busy machine each takes many times its own time.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = run_file(
        tmp_path_factory.mktemp("resume"),
        train={"steps": STEPS, "global_batch_sequences": 6},
        checkpoint={"every": 2},
        model={"config": {**_with_dropout()}},
    )
    make_chats(path.parent / "chats.jsonl", count=24)
    return path


def _with_dropout() -> dict[str, object]:
    import tiny

    # Dropout makes the random state matter: a resume that lost it would show at once.
    return tiny.config(attention_dropout=0.1)


@pytest.fixture(scope="module")
def whole(path: Path) -> list[str]:
    run(path, "name=whole")
    found = losses(path, "whole")
    assert len(found) == STEPS and history(path, "whole").kept[-1].epoch >= 1, "the run must reach the second epoch"
    return found


def kill_after(path: Path, name: str, step: int) -> None:
    """Starts a run and kills all its processes once metrics show `step`."""
    started = start(path, f"name={name}")
    deadline = time.monotonic() + 700
    while started.is_running() and time.monotonic() < deadline:
        kept = history(path, name).kept
        if kept and kept[-1].step >= step:
            started.send_to_all(signal.SIGKILL)
            break
        time.sleep(0.02)
    started.wait(700)


def stopped_in(path: Path, name: str, step: int, number: int, *overrides: str) -> tuple[int, str]:
    """The exit code of a run that is sent a signal (its launcher, if it has one) when `step` begins, and what it said."""
    begin = Run.begin_step

    def and_be_told(run: Run) -> None:
        if run.step + 1 == step and run.reporter.rank == 0:
            os.kill(os.getppid() if run.beacon is not None else os.getpid(), number)
        begin(run)

    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(Run, "begin_step", and_be_told)
        started = start(path, f"name={name}", *overrides)  # forked from here, with this in it
    return started.wait(700), started.out.read_text()


def test_kill_minus_nine_three_times(path: Path, whole: list[str]) -> None:
    for step in (3, 5, 7):
        kill_after(path, "killed", step)
    run(path, "name=killed")
    assert losses(path, "killed") == whole
    assert same_weights(path, "killed", "whole")
    told = history(path, "killed")
    assert len(told.sessions) >= 3 and [line.step for line in told.kept] == list(range(1, STEPS + 1))


def stopped_politely(path: Path, name: str, step: int, number: int) -> None:
    code, said = stopped_in(path, name, step, number)
    assert code == 75 and "the same command goes on" in said
    stopped = history(path, name)
    assert stopped.sessions[-1].end is not None and stopped.sessions[-1].end.reason == "preempted"
    assert stopped.checkpoints[-1].step == stopped.kept[-1].step, "nothing may be lost to a polite stop"


def test_sigterm_saves_and_says_how_to_go_on(path: Path, whole: list[str]) -> None:
    stopped_politely(path, "preempted", 2, signal.SIGTERM)
    run(path, "name=preempted")
    assert losses(path, "preempted") == whole and not history(path, "preempted").lost


def same_weights(path: Path, left: str, right: str) -> bool:
    one, other = (load_file(path.parent / "runs" / name / "model" / "model.safetensors") for name in (left, right))
    return one.keys() == other.keys() and all(bool((one[key] == other[key]).all()) for key in one)


def test_ctrl_c_saves_too_and_a_planted_lost_random_state_shows(
    path: Path, whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_politely(path, "forgetful", 2, signal.SIGINT)
    monkeypatch.setattr("headway.train.resume.set_rng_state", lambda state: [])
    before = len(losses(path, "forgetful"))
    run(path, "name=forgetful")
    found = losses(path, "forgetful")
    assert found[:before] == whole[:before] and found[before:] != whole[before:]


def test_two_ranks_resume_bitwise_and_one_goes_on_from_two(path: Path) -> None:
    two = ("parallel.ranks=2", "parallel.fsdp=2")
    run(path, "name=two", *two)
    assert stopped_in(path, "two-stopped", 4, signal.SIGTERM, *two)[0] == 75
    shutil.copytree(path.parent / "runs" / "two-stopped", path.parent / "runs" / "fewer")
    run(path, "name=two-stopped", *two)
    assert losses(path, "two-stopped") == losses(path, "two")
    # Another number of ranks: the same documents in the same global order.
    run(path, "name=fewer")
    assert history(path, "fewer").sessions[-1].start.resumed_from in (4, 5)
    pairs = zip(history(path, "fewer").kept, history(path, "two").kept, strict=True)
    for a, b in pairs:
        assert (a.documents, a.epoch, a.tokens) == (b.documents, b.epoch, b.tokens)
        assert a.loss == pytest.approx(b.loss, rel=0.02), "dropout falls on other elements, and nothing else differs"


def test_other_data_or_length_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"steps": 3})
    run(path)
    refused = run(path, "data.seq_len=100", expect=2)
    assert "data.seq_len: 128 → 100" in refused.err and "Traceback" not in refused.err
    assert "isolation" not in refused.out, "refused before minutes go into a model"
    refused = run(path, "data.seq_len=100", "checkpoint.allow=[data.seqlen]", expect=2)
    assert "data.seqlen is no key that a resume compares; did you mean data.seq_len?" in refused.err
    make_chats(tmp_path / "chats.jsonl", count=61, seed=1)
    refused = run(path, expect=2)
    assert f"content of data source 0 ({tmp_path / 'chats.jsonl'}): " in refused.err
    before = len(history(path).sessions)
    run(path, "checkpoint.allow=[content of data source 0, documents of data source 0, data]", expect=0)
    assert any("allowed to differ" in note for note in history(path).sessions[before].start.facts.get("notes", []))


def test_a_finished_run_has_nothing_left_and_loses_nothing(tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"steps": 2}, eval={"holdout": 4, "every": 1})
    run(path)
    told = history(path)
    assert [line.step for line in told.evals] == [1, 2], "once a step, also at the end"
    run(path)
    again = history(path)
    assert losses(path) == [line.loss.hex() for line in told.kept if line.loss is not None]
    assert len(again.sessions) == 2 and not again.lost


def test_eight_bit_adam_resumes_bitwise(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    big = {
        "model": {"config": {**_with_dropout(), "vocab_size": 320, "hidden_size": 64}}
    }  # 8 bits hold large tensors only
    path = run_file(tmp_path, train={"steps": 6}, optim={"name": "adamw8bit"}, **big)
    # Compiling the update for every shape in every session takes longer than all the rest; the test below does it once.
    with torch.compiler.set_stance("force_eager"):
        _eight_bit_resumes(path)


def _eight_bit_resumes(path: Path) -> None:
    run(path, "name=whole8")
    run(path, "name=parts8", "checkpoint.every=3")
    (removed,) = RunFolder(path.parent / "runs" / "parts8").checkpoints.glob("step-00000006.*")
    shutil.rmtree(removed)
    assert not RunFolder(path.parent / "runs" / "parts8").incidents.exists(), (
        "a state that cannot be staged is no fault"
    )
    run(path, "name=parts8", "checkpoint.every=3")
    assert history(path, "parts8").sessions[-1].start.resumed_from == 3
    assert losses(path, "parts8") == losses(path, "whole8")


def test_a_compiled_eight_bit_update_is_the_uncompiled_one() -> None:
    pytest.importorskip("torchao")

    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(9))

    def moved(stance: str) -> tuple[torch.Tensor, str]:
        layer = torch.nn.Linear(64, 64, bias=False)
        layer.weight.data.copy_(start)
        optimizers = build_optimizers(layer, OptimConfig(name="adamw8bit", lr=1e-2))
        with torch.compiler.set_stance(stance):
            for step in range(3):
                layer.weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
                optimizers.step(torch.tensor(True))
        (state,) = optimizers.items[0].state.values()
        return layer.weight.detach() - start, type(state["exp_avg"]).__name__

    compiled, kind = moved("default")
    plain, _ = moved("force_eager")
    # Now and then a number of the state is rounded to the neighbouring one of its 256 values.
    assert kind == "OptimState8bit" and float((compiled - plain).norm()) < 0.1 * float(plain.norm())


def test_an_evaluation_before_the_first_step_is_of_the_model_as_loaded(tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"steps": 2}, eval={"holdout": 4, "at_start": True})
    done = run(path)
    assert [line.step for line in history(path).evals] == [0, 2] and "at step 0 →" in done.out
    first = history(path).evals[0].nll
    assert abs(first - math.log(320)) < 0.1, "random weights know nothing: the loss is that of a uniform guess"
    run(path)
    assert [line.step for line in history(path).evals][:2] == [0, 2], "a resume does not begin again"
