"""Every command as a user calls it: what it prints, its exit code, one line for a mistake and never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from headway.cli.main import main
from headway.model.kernels.case import Choice, Result
from headway.model.kernels.choose import Chosen
from tiny import config, make_chats, make_tokenizer, run_file
from train.running import run


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out
    return int(end.value.code or 0), told.out, told.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run that is over, for all that only look at it."""
    path = run_file(
        tmp_path_factory.mktemp("trained"), train={"steps": 4}, eval={"holdout": 4}, checkpoint={"every": 2}
    )
    run(path)
    return path


@pytest.fixture
def own_trained(tmp_path: Path) -> Path:
    path = run_file(tmp_path, train={"steps": 4}, checkpoint={"every": 2})
    run(path)
    return path


@pytest.mark.parametrize(
    "command",
    ["", "train", "data", "data prepare", "data inspect", "checkpoint", "checkpoint list", "checkpoint verify", "checkpoint export", "checkpoint prune", "checkpoint advise", "report", "doctor", "bench", "bench peak", "bench data", "bench packing", "bench kernels", "bench checkpoint"],
)  # fmt: skip
def test_help_is_there_and_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = call(capsys, *command.split(), "--help")
    assert code == 0 and "Usage" in out
    if command.count(" ") == 1 or command in ("", "train", "report", "doctor"):
        assert "Example: headway" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "train"),
        (["train"], "RUN.yaml"),
        (["train", "none.yaml"], "no such run file"),
        (["report", "nowhere"], "no such folder"),
        (["checkpoint", "list", "nowhere"], "no such folder"),
        (["data", "inspect", "nowhere"], "nowhere"),
        (["data", "inspect", "x", "--show", "-1"], "--show"),
        (["data", "prepare", "x.jsonl", "--tokenizer", "t", "--out", "o", "--workers", "-2"], "--workers"),
        (["data", "prepare", "nowhere.jsonl", "--tokenizer", "t", "--out", "o"], "nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, *arguments)
    assert code == 2 and said in err


def test_prepare_and_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokenizer, chats = make_tokenizer(tmp_path / "tok"), make_chats(tmp_path / "chats.jsonl", count=12)
    with chats.open("a") as file:
        file.write('{"nonsense": 1}\n')
    shards = tmp_path / "shards"
    arguments = ["data", "prepare", chats, "--tokenizer", tokenizer, "--out", shards, "--max-bad", "0.01"]
    code, _, err = call(capsys, *arguments)
    assert code == 2 and "--max-bad allows 1.0%" in err and "data.max_bad" not in err, "there is no run file here"
    arguments[-1] = "0.2"
    code, out, _ = call(capsys, *arguments)
    assert code == 0 and "messages, 12 documents, 1 rejected" in out
    assert json.loads((shards / "rejected.jsonl").read_text())["line"] == 13
    code, out, _ = call(capsys, *arguments, "--json")
    record = json.loads(out)
    assert record["reused"] and record["documents"] == 12 and record["rejected"] == 1
    code, out, _ = call(capsys, "data", "inspect", shards, "--show", "2", "--seq-len", "20")
    assert code == 0 and "⟦" in out and "<|im_end|>⟧" in out, "the end token is trained"
    assert "⟦<|im_start|>" not in out, "the role header is not"
    assert "longer than 20" in out


def test_train_resume_report_and_checkpoints(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = trained.parent / "runs" / "tiny"
    code, out, _ = call(capsys, "report", run, "--json")
    facts = json.loads(out)
    assert code == 0 and (run / "report.html").is_file()
    for name in ("run_account", "step_account"):
        assert sum(facts[name]["parts"].values()) == facts[name]["wall_ns"] > 0
    code, out, _ = call(capsys, "checkpoint", "list", run, "--json")
    listed = json.loads(out)
    assert [row["step"] for row in listed] == [2, 4] and listed[0]["optimizer_bytes"] > listed[0]["model_bytes"]
    assert call(capsys, "checkpoint", "verify", run)[0] == 0
    code, out, _ = call(capsys, "checkpoint", "advise", run)
    assert code == 0 and "disk: every" in out and "no failure yet" in out
    assert "per rank-day" in out and "GPU-day" not in out, "it ran on a CPU"
    code, out, _ = call(capsys, "checkpoint", "export", run, tmp_path / "model", "--step", "2")
    assert code == 0 and (tmp_path / "model" / "model.safetensors").is_file()
    code, _, err = call(capsys, "checkpoint", "export", run, tmp_path / "model")
    assert code == 2 and "exists" in err
    code, _, err = call(capsys, "checkpoint", "export", run, tmp_path / "other", "--step", "3")
    assert code == 2 and "no checkpoint of step 3; there are: 2, 4" in err


def test_a_flipped_bit_is_bad_news(own_trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = own_trained.parent / "runs" / "tiny"
    shard = sorted(run.glob("checkpoints/step-00000004*/*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, out, _ = call(capsys, "checkpoint", "verify", run)
    assert code == 1 and shard.name in out
    code, out, _ = call(capsys, "train", own_trained)
    assert code == 0 and "newer checkpoint not used" in out, "the run goes on from the older one and says why"
    code, out, _ = call(capsys, "checkpoint", "prune", run, "--keep", "1", "--json")
    told = json.loads(out)
    left = [row["checkpoint"] for row in json.loads(call(capsys, "checkpoint", "list", run, "--json")[1])]
    assert code == 1 and [shard.parent.name in line for line in told["left"]] == [True], (
        "what is damaged stays, and is said"
    )
    assert sorted(left) == sorted([shard.parent.name, "step-00000004.g0003"])


def test_the_trained_model_loads_in_transformers(trained: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained.parent / "runs" / "tiny" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert model(**ids).logits.isfinite().all()
    assert tokenizer.chat_template


def test_show_prints_a_loadable_run_file_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path)
    code, out, _ = call(capsys, "train", path, "--show", "data.seq_len=99")
    assert code == 0 and yaml.safe_load(out)["data"]["seq_len"] == 99
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.seqlen=4"], "data.seq_len"),
        (["parallel.fsdp=2", "parallel.ranks=3"], "must be equal"),
        (["schedule.warmup=50"], "schedule.warmup"),
        (["data.overlong=drop", "data.seq_len=2"], "data.seq_len"),
        (["eval.holdout=1000"], "eval.holdout"),
        (["model.lora={targets: [no_such]}"], "no_such"),
        (["model.attention=flash"], "model.attention"),
        (["device=cuda"], "no GPU"),
        (["optim=null"], "optim is a section; set its keys: optim.name"),
    ],
)
def test_bad_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str) -> None:
    code, _, err = call(capsys, "train", run_file(tmp_path), *overrides)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [("model_type=lama", "lama"), ("hidden_size=-4", "no model can be made of it"), ("num_attention_heads=3", "heads")],
)
def test_a_model_that_cannot_be_made_is_refused_before_any_data_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    for ranks in ("1", "2"):
        code, _, err = call(capfd, "train", run_file(tmp_path), f"model.config.{change}", f"parallel.ranks={ranks}")
        assert code == 2 and said in err and len(err.strip().splitlines()) == 1
        assert not (tmp_path / "runs" / "shards").exists()


def test_checkpoints_are_found_where_everything_else_is_lost(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained.parent / "runs" / "tiny", tmp_path / "tiny"))
    (run / "metrics.jsonl").unlink()
    code, out, _ = call(capsys, "checkpoint", "verify", run)
    assert code == 0 and "verified" in out
    assert call(capsys, "checkpoint", "export", run, tmp_path / "rescued")[0] == 0
    code, _, err = call(capsys, "report", run)
    assert code == 2 and "metrics.jsonl" in err


def test_a_vocabulary_larger_than_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path, model={"config": config(vocab_size=200)})
    code, _, err = call(capsys, "train", path)
    assert code == 2 and "beyond the model's vocabulary of 200" in err and "chats.jsonl:" in err


def test_half_set_rank_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    code, _, err = call(capsys, "train", run_file(tmp_path))
    assert code == 2 and "WORLD_SIZE" in err


def test_one_sample_and_an_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path, train={"steps": 2, "global_batch_sequences": 4})
    make_chats(tmp_path / "chats.jsonl", count=1)
    assert call(capsys, "train", path)[0] == 0
    (tmp_path / "chats.jsonl").write_text("")
    code, _, err = call(capsys, "train", path, "name=empty")
    assert code == 2 and "chats.jsonl" in err


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "doctor", "--json", "--out", tmp_path)
    assert code == 0 and {"torch", "matmul", "peak", "disk"} <= {item["check"] for item in json.loads(out)}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"lora": {"rank": 4}}},
        {"optim": {"name": "muon"}},
        {"model": {"recompute": "full"}, "data": {"pack": "none", "rows": 3, "slots": None}},
        {"train": {"loss": {"z_loss": 1e-4, "label_smoothing": 0.1}}},
        {"preset": "naive"},
        {"preset": "fast"},
    ],
)
def test_other_ways_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object]) -> None:
    path = run_file(tmp_path, **changes)  # type: ignore[arg-type]
    code, out, _ = call(capsys, "train", path, "train.steps=3", "log.quiet=false")
    assert code == 0 and "step 3/3" in out
    folder = path.parent / "runs" / "tiny"
    assert (folder / "model" / "config.json").is_file()
    if "lora" in json.dumps(changes):
        assert (folder / "model-adapter" / "adapter_config.json").is_file()


def test_a_run_that_stopped_learning_is_bad_news_and_no_goodput(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path)
    code, out, err = call(capsys, "train", path, "train.steps=6", "optim.lr=1e30", "guard.spikes=off")
    assert code == 1 and "the last 5 steps updated nothing: these are the weights of step 1" in err
    assert "last update" in out
    code, out, _ = call(capsys, "report", tmp_path / "runs" / "tiny", "--json")
    told = json.loads(out)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    first, *rest = [line for line in lines if line["event"] == "step"]
    assert told["kept"]["trained_tokens"] == first["trained_tokens"] and told["idle_tail"] == 5
    assert told["kept"]["flops"]["useful"] == first["flops"]["useful"] > 0
    parts = told["run_account"]["parts"]
    skipped = sum(line["wall_ns"] - line["account"].get("checkpoint", 0) for line in rest)
    assert parts["rework"] == skipped and parts.get("productive", 0) <= first["wall_ns"]


def test_two_trainings_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headway.guard.folder_lock import FolderLock

    path = run_file(tmp_path)
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    other = FolderLock(folder)
    other.acquire()
    code, _, err = call(capsys, "train", path)
    assert code == 2 and "another training runs in this folder" in err
    other.release()
    assert call(capsys, "train", path, "train.steps=1")[0] == 0


def test_bench_kernels_prints_every_candidate_and_keeps_the_choice(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    path = run_file(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["bench", "kernels", str(path), "--seconds", "9"])
    out = capsys.readouterr().out
    assert (
        end.value.code in (0, None) and "linear_loss" in out and "chunked" in out and "its kernels are for CUDA" in out
    )
    assert (tmp_path / "home" / "kernels.json").is_file()
    wrong = Choice("optimizer", "", "float32", "eager", (Result("fused", wrong=True, reason="is wrong"),))
    monkeypatch.setattr("headway.bench.kernels.bench_kernels", lambda *_: Chosen((), (), 0.0, update=(wrong,)))
    with pytest.raises(SystemExit) as end:
        main(["bench", "kernels", str(path)])
    assert end.value.code == 1, "of the update, too"


def test_memory_that_runs_out_anywhere_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the model is put on the device, or as the first update makes the optimizer's state."""
    wrong: list[RuntimeError] = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")]

    def fails(*_: object) -> None:
        raise wrong[0]

    monkeypatch.setattr("headway.config.load.load_run", fails)
    code, _, err = call(capsys, "train", "run.yaml")
    assert code == 1 and err.startswith("headway: CUDA out of memory. Tried to allocate 20.00 MiB: lower data.slots")
    wrong[0] = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        main(["train", "run.yaml"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launch RUN --ranks 0", "--ranks"),  # it meant what the run file says
        ("launch RUN --min-ranks 0", "--min-ranks"),
        ("tune RUN --precision --against fast", "--against"),  # it was ignored
        ("bench packing --rounds 0", "--rounds"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{}")
    code, _, err = call(capsys, *(str(path) if word == "RUN" else word for word in words.split()))
    assert code == 2 and said in err and err.count("\n") == 1
