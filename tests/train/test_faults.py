"""What a hostile user found: each must be refused in one line, survived, or cost nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.account.events import RankLine
from headway.record.folder import RunFolder
from headway.record.incidents import read_incidents
from headway.record.jsonl import read_jsonl
from headway.record.sessions import read_history
from headway.train.optim import Optimizers
from headway.train.run import Run
from headway.watch.incidents import read_overview
from tiny import CHATML, config, run_file
from train.running import history, losses, run, start

# Whole processes, several at once: on a busy machine each takes many times its own time.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return run_file(tmp_path, train={"steps": 4}, checkpoint={"every": 2})


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_a_lora_resume_notices_other_base_weights(tmp_path: Path) -> None:
    base = run_file(tmp_path, train={"steps": 1})
    run(base)
    model = tmp_path / "runs" / "tiny" / "model"
    settings = ("name=lora", f"model.path={model}", "model.config=null", "model.lora={rank: 4}", "train.steps=4")
    run(base, *settings)
    for newer in (tmp_path / "runs" / "lora" / "checkpoints").glob("step-00000004*"):
        newer.rename(tmp_path / newer.name)
    weights = load_file(model / "model.safetensors")
    key = next(name for name in weights if "mlp" in name)
    weights[key][0, 0] += 1e-3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run(base, *settings, "checkpoint.every=2")  # nothing to resume from: a new run
    refused_before = len(history(base, "lora").sessions)
    weights[key][0, 0] += 1e-3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    refused = run(base, *settings, "checkpoint.every=2", expect=2)
    assert "frozen base weights" in refused.err and len(history(base, "lora").sessions) == refused_before


@pytest.mark.parametrize("part", ["tokens", "mask", "offsets"])
def test_a_flipped_bit_in_a_shard_is_found_before_the_first_step(path: Path, part: str) -> None:
    run(path, "train.steps=1")
    shard = next((path.parent / "runs" / "shards").rglob(f"*.{part}.npy"))
    flip(shard, -9)
    refused = run(path, "name=second", expect=2)
    assert shard.name in refused.err and "prepare the data again" in refused.err


def test_a_closed_reader_costs_the_output_not_the_run(path: Path) -> None:
    pipe = path.parent / "pipe"
    os.mkfifo(pipe)
    started = start(path, "log.quiet=false", out=pipe)
    os.close(os.open(pipe, os.O_RDONLY))
    assert started.wait(700) == 0, started.err.read_text()[-2000:]
    assert history(path).kept[-1].step == 4 and history(path).sessions[-1].end is not None


def test_files_beside_the_exported_model_are_never_deleted(path: Path) -> None:
    run(path)
    notes = path.parent / "runs" / "tiny" / "model" / "NOTES.txt"
    notes.write_text("mine")
    run(path)
    assert notes.read_text() == "mine", "nothing was trained, so nothing is exported again"
    run(path, "train.steps=5", "checkpoint.allow=[train.steps]")
    assert (path.parent / "runs" / "tiny" / "model-before-1" / "NOTES.txt").read_text() == "mine"


@pytest.mark.parametrize("content", [None, "{}", "garbage"])
def test_a_lost_or_damaged_run_id(path: Path, content: str | None) -> None:
    run(path)
    before = losses(path)
    file = path.parent / "runs" / "tiny" / "run_id.json"
    known = file.read_text()
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
        assert "run_id.json" in run(path, expect=2).err
        file.unlink()
    run(path)
    assert file.read_text() == known and losses(path) == before, "the id is that of the newest checkpoint"


def test_a_model_folder_that_is_missing_is_named_before_anything_is_tokenised(path: Path) -> None:
    refused = run(path, "model.path=./nowhere", "model.config=null", expect=2)
    assert "model.path" in refused.err and "no such folder" in refused.err
    assert not (path.parent / "runs" / "shards").exists()


def test_a_name_that_would_share_a_folder_is_refused(path: Path) -> None:
    assert "another name" in run(path, "name=shards", expect=2).err


def test_a_save_that_fails_is_an_incident_and_the_model_is_still_exported(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    from headway.guard import writing

    usage = namedtuple("usage", "total used free")
    real = writing.shutil.disk_usage

    def full_for_checkpoints(where: object) -> object:
        return usage(100, 100, 0) if "checkpoints" in str(where) else real(where)  # type: ignore[arg-type]

    monkeypatch.setattr(writing.shutil, "disk_usage", full_for_checkpoints)
    done = run(path, expect=1)
    assert "could not be saved" in done.err and "make room" in done.err
    assert "the trained weights are in" in done.err and "headway report" in done.err
    folder = RunFolder(path.parent / "runs" / "tiny")
    assert (folder.final_model / "model.safetensors").is_file()
    from headway.account.events import Incident

    faults = [item.fault for item in read_jsonl(folder.incidents, Incident).items]
    assert set(faults) == {"checkpoint failed", "stopped"}, "one or two: a save that is due waits for the one before"
    assert [line.step for line in history(path).kept] == [1, 2, 3, 4]
    monkeypatch.setattr(Run, "has_steps_left", lambda run: run.step < 4 and not os.kill(os.getpid(), signal.SIGTERM))
    assert "step 1 could not be saved" in run(path, "name=stopped", expect=1).err, "75 is for a state that is saved"


def test_a_run_that_stops_without_a_checkpoint_says_so(path: Path) -> None:
    done = run(path, "optim.lr=1e30", "schedule={kind: constant}", "checkpoint.every=null", expect=1)
    assert "no older checkpoint to go back to" in done.err and "the run begins anew" in done.err
    assert "goes on from" not in done.err
    assert read_overview(RunFolder(path.parent / "runs" / "tiny")).failures == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=24m tmpfs {disk} 2>/dev/null") != 0:
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    os.system(f"umount -l {disk}")


def test_a_full_disk_under_the_run_folder_ends_no_run_and_loses_no_line(
    path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, the ranks' lines, the ledger and checkpoints are all there; another program fills the disk."""
    filler, real = small_disk / "filler", Run.begin_step

    def begin(run: Run) -> None:
        if 3 <= run.step < 9:  # again and again: a save that fails gives its room back
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        if run.step == 9:
            run.saves.tiers.settle()
            filler.unlink(missing_ok=True)
        real(run)

    monkeypatch.setattr(Run, "begin_step", begin)
    done = run(path, f"out={small_disk}", "train.steps=12", "checkpoint.max_failures=null")
    folder = RunFolder(small_disk / "tiny")
    assert [line.step for line in read_history(folder).kept] == list(range(1, 13))
    assert [line.step for line in read_jsonl(folder.rank(0), RankLine).items] == list(range(1, 13))
    ledger = read_incidents(folder.incidents)
    assert ledger.bad == [] and any(found.fault == "checkpoint failed" for found in ledger.items)
    assert f"{folder.metrics}: not written (No space left on device)" in done.err
    assert f"{folder.metrics}: written again" in done.err and "lost" not in done.err


def test_a_start_beside_a_full_disk_is_refused(path: Path, small_disk: Path) -> None:
    """One went on from memory, trained 29 steps, and left no line of them."""
    with contextlib.suppress(OSError), (small_disk / "filler").open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    refused = run(path, f"out={small_disk}", expect=2)
    assert f"{small_disk}/tiny: No space left on device: not one line of the run could be written" in refused.err
    folder = RunFolder(small_disk / "tiny")
    assert not folder.metrics.exists() and not list(folder.root.glob(".room*"))


def test_held_out_data_beyond_the_vocabulary_is_refused_before_the_first_step(path: Path) -> None:
    run(path, "train.steps=1", "name=sources")
    (shards,) = {manifest.parent for manifest in (path.parent / "runs" / "shards").rglob("manifest.json")}
    small = f"model.config={{{', '.join(f'{k}: {v}' for k, v in config(vocab_size=300).items())}}}"
    bytes_only = path.parent / "bytes.jsonl"
    bytes_only.write_text('{"text": "zzzz xxxx zzzz"}\n' * 20)
    refused = run(path, "name=small", small, f"data.sources=[{bytes_only}]", f"eval.data=[{shards}]", expect=2)
    assert "beyond the model's vocabulary of 300" in refused.err and "Traceback" not in refused.err


def test_a_failing_last_evaluation_takes_nothing_with_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("headway.train.evaluate.held_out_sums", fails)
    with pytest.raises(RuntimeError, match="planted"):
        run(path, "eval.holdout=4")
    assert (path.parent / "runs" / "tiny" / "model" / "model.safetensors").is_file()
    assert history(path).checkpoints[-1].step == 4


def test_the_exported_tokenizer_has_the_template_that_was_trained_on(path: Path) -> None:
    template = path.parent / "t.jinja"
    template.write_text(CHATML.replace("user", "human") + "{# mine #}")
    run(path, f"data.chat_template={template}", "train.steps=1")
    exported = path.parent / "runs" / "tiny" / "model" / "chat_template.jinja"
    assert exported.read_text() == template.read_text()


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([parameter], lr=torch.tensor(0.5), capturable=False, foreach=False)
    optimizers = Optimizers([inner], skips_on_device=False)
    held = inner.param_groups[0]["lr"]
    assert optimizers.set_lr(0.1) == pytest.approx(0.05) and inner.param_groups[0]["lr"] is held
    assert optimizers.set_lr(0.2) == pytest.approx(0.1)
    assert isinstance(optimizers.set_lr(1.0), float)


def test_a_hybrid_model_is_refused_by_name(tmp_path: Path) -> None:
    hybrid = {
        "model_type": "bamba",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    }
    refused = run(run_file(tmp_path, model={"config": config() and hybrid}), expect=2)
    assert "Mamba" in refused.err or "mamba" in refused.err


@pytest.mark.parametrize(
    ("override", "said"),
    [("train.epochs=1e9", "train.epochs"), ("train.tokens=10000000000000", "passes over the data")],
)
def test_a_length_that_nobody_means_is_refused_at_once(tmp_path: Path, override: str, said: str) -> None:
    path = run_file(tmp_path, train={"steps": None, "epochs": 1})
    overrides = [override] if "epochs" in override else ["train.epochs=null", override]
    assert said in run(path, *overrides, expect=2).err
