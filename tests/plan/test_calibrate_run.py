"""Calibration from a run folder and from bench files: planted factors and rates come back, bad files are one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from headway.account.errors import UserError
from headway.account.events import Flops, SessionStart, StepLine
from headway.account.flops import document_flops
from headway.account.shape import ModelShape
from headway.cli.main import _join_commands, _run
from headway.plan.bench_file import cluster_keys, read_bench
from headway.plan.calibrate import calibrate, trust
from headway.plan.cluster import load_cluster
from headway.plan.constants import default_constants
from headway.plan.predict import predict
from headway.plan.run_case import case_of_run
from headway.plan.workload import load_config
from headway.record.jsonl import JsonlWriter

SEQ, BATCH = 4096, 64


def run_folder(path: Path, wall_s: float, *, document: int = SEQ, **facts: object) -> Path:
    """A run of Llama 3 8B on 8 H100 that took `wall_s` a step."""
    path.mkdir()
    config = dict(load_config("llama3-8b")[1])
    content = {"name": path.name, "model": {"path": None, "config": config, "recompute": "full", "fuse": "auto"},
               "data": {"seq_len": SEQ, "slots": SEQ}, "train": {"compile": False}}  # fmt: skip
    (path / "run.yaml").write_text(yaml.safe_dump(content))
    start = SessionStart(
        session=0, time=0.0, resumed_from=0, world_size=8, steps=9, device="NVIDIA H100 80GB HBM3", peak_flops=9.9e14,
        facts={"precision": "bf16", "fsdp": 8, "replicate": 1, **facts},
    )  # fmt: skip
    useful = document_flops(ModelShape.from_config(config), [document]).total * (SEQ * BATCH // document)
    lines = [
        StepLine(
            session=0, step=n + 1, time=0.0, epoch=0, documents=BATCH, loss=1.0, nll=1.0, grad_norm=1.0, lr=1e-5, sequences=BATCH,
            slots=SEQ * BATCH, tokens=SEQ * BATCH, trained_tokens=SEQ, wall_ns=round(wall_s * 1e9), account={"compute": 10**6},
            flops=Flops(useful=useful), run_ns={}, micro_batches=8,
        )
        for n in range(9)
    ]  # fmt: skip
    writer = JsonlWriter(path / "metrics.jsonl")
    for line in (start, *lines):
        writer.append(line)
    writer.close()
    return path


def test_a_run_folder_is_its_model_plan_and_step(tmp_path: Path) -> None:
    case = case_of_run(run_folder(tmp_path / "run", 3.0))
    assert case.work.shape.parameters == 8_030_261_248 and (case.work.seq, case.work.global_batch) == (SEQ, BATCH)
    assert (
        case.layout.dp == 8
        and case.layout.zero == 3
        and case.layout.micro_batch == 1
        and case.layout.recompute == "full"
    )
    assert case.group == ("headway", "H100-SXM-80GB", "bf16") and case.step_s == 3.0
    assert case.work.attended == pytest.approx(SEQ, abs=1)
    packed = case_of_run(run_folder(tmp_path / "packed", 3.0, document=512))
    assert packed.work.attended == pytest.approx(512, abs=1)  # documents cost what their own length costs


def test_a_planted_slow_run_gives_its_factor_back(tmp_path: Path) -> None:
    case = case_of_run(run_folder(tmp_path / "probe", 1.0))
    seconds = predict(case.work, case.layout, case.cluster).step_s
    slow = [case_of_run(run_folder(tmp_path / f"run{n}", 1.5 * seconds)) for n in range(3)]
    factors = calibrate(slow, default_constants()).factors
    assert factors["headway", "H100-SXM-80GB", "bf16"] == pytest.approx(1.5 ** trust([math.log(1.5)] * 3), rel=1e-3)


def test_runs_that_cannot_be_read_name_the_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 1.0)
    (folder / "run.yaml").write_text("model: {path: /nowhere/at/all}\n")
    with pytest.raises(UserError, match=r"model.path '/nowhere/at/all' is not there any more"):
        case_of_run(folder)
    (folder / "run.yaml").write_text("{")
    with pytest.raises(UserError, match="not YAML"):
        case_of_run(folder)
    (folder / "run.yaml").unlink()
    with pytest.raises(UserError, match=r"run.yaml: no such file"):
        case_of_run(folder)


def entry(op: str, size: float, bus: float, nodes: int = 1, ranks: int = 8) -> dict[str, object]:
    volume = {"all_reduce": 2.0}.get(op, 1.0) * (ranks - 1) / ranks
    return {"op": op, "ranks": ranks, "nodes": nodes, "bytes": size, "seconds": volume * size / bus}


def test_planted_rates_and_links_come_back_in_a_prediction(tmp_path: Path) -> None:
    c = default_constants()
    entries = [
        {"device": "x", "dtype": "bf16", "flops": 7e14, "bandwidth": 3e12},
        *(
            entry(op, size, 2e11 if size > 1e6 else 1e10)
            for op in ("all_reduce", "all_gather")
            for size in (1e5, 6e8, 1e9)
        ),
        entry("reduce_scatter", 1e9, 8 * 4e10, nodes=2, ranks=16),
    ]
    keys = cluster_keys(entries, c, "x")
    assert keys["measured_bf16_tflops"] == pytest.approx(700) and keys["bandwidth_gbs"] * c.hbm == pytest.approx(3000)
    assert keys["link_gbs"] * c.intra == pytest.approx(200) and keys["inter_node_gbs"] * c.inter == pytest.approx(40)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"device": "H100", "gpus": 16, **keys}))
    cluster = load_cluster(str(path))
    assert cluster.device.measured["bf16"] == pytest.approx(7e14) and cluster.inter_node * c.inter == pytest.approx(
        4e10
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "nothing that"),
        ('[{"a": 1}]', "nothing that"),
        ('[{"dtype": "fp32", "flops": 1e12}]', "no rate of bf16"),
        ('[{"dtype": "bf16", "flops": -1}]', "'flops' is -1"),
        ('[{"op": "all_reduse", "ranks": 8, "bytes": 1, "seconds": 1}]', "nearest: all_reduce"),
        ('[{"op": "all_reduce", "ranks": 8, "bytes": 1, "seconds": "x"}]', "'seconds' is 'x'"),
    ],
)
def test_bench_files_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        cluster_keys(read_bench(path), default_constants(), str(path))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _join_commands()
    out = tmp_path / "factors.json"
    run = run_folder(tmp_path / "run", 3.0)
    assert _run(["plan", "calibrate", str(run), "--out", str(out)], debug=False) == 0
    assert "measured 3 s, predicted" in capsys.readouterr().out
    base = [
        "plan",
        "--model",
        "llama3-8b",
        "--cluster",
        "H100x8",
        "--fix",
        "pp=1,micro_batch=1,tp=1",
        "--global-batch",
        "64",
        "--json",
    ]
    assert _run(base, debug=False) == 0
    plain = json.loads(capsys.readouterr().out)["plans"][0]["step_s"]
    assert _run([*base, "--calibrate", str(out)], debug=False) == 0
    factor = json.loads(out.read_text())["groups"][0]["factor"]
    assert json.loads(capsys.readouterr().out)["plans"][0]["step_s"] == pytest.approx(plain * factor)
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps([entry("all_reduce", 1e9, 2e11)]))
    assert (
        _run(["plan", "calibrate", str(bench), "--cluster", "H100x8", "--out", str(tmp_path / "c.yaml")], debug=False)
        == 0
    )
    assert load_cluster(str(tmp_path / "c.yaml")).gpus == 8
    capsys.readouterr()
    for arguments, says in (
        ([str(bench)], "needs --cluster"),
        ([str(tmp_path / "no")], "no such file or folder"),
        ([str(tmp_path)], "no metrics.jsonl"),
    ):
        assert _run(["plan", "calibrate", *arguments], debug=False) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def test_planted_namesakes_both_calibrate_and_each_is_named_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs called `run`, two tables with equal row ids: neither replaces the other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    case = case_of_run(run_folder(tmp_path / "probe", 1.0))
    seconds = predict(case.work, case.layout, case.cluster).step_s
    runs = [str(run_folder(tmp_path / name / "run", share * seconds)) for name, share in (("one", 1.2), ("two", 1.4))]
    _join_commands()
    assert _run(["plan", "calibrate", *runs, runs[0], "--json"], debug=False) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    logs = [math.log(1.2), math.log(1.4)]
    assert sorted(group["rows"]) == runs and group["factor"] == pytest.approx(
        math.exp(trust(logs) * sum(logs) / 2), rel=1e-3
    )
    far = str(run_folder(tmp_path / "two" / "far", 100 * seconds))
    assert _run(["plan", "calibrate", *runs, far], debug=False) == 0
    assert f"skipped: {far}: its step took" in capsys.readouterr().out
    assert _run(["plan", "calibrate", far], debug=False) == 2
    assert f"1 row too far from the prediction, the first {far}: its step took" in capsys.readouterr().err


def test_rows_too_far_apart_are_said_with_their_own_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "model,gpu,gpus,seq_len,tp,pp,micro_batch,global_batch,step_time_s"
    good, far = ("Llama3-8B,H100,8,8192,1,1,1,64,6", "Llama3-8B,H100,8,8192,1,1,1,64,6000")
    (tmp_path / "a.csv").write_text(f"{head}\n{good}\n")
    (tmp_path / "b.csv").write_text(f"{head}\n\n{far}\n")
    _join_commands()
    assert _run(["plan", "calibrate", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--json"], debug=False) == 0
    (left,) = json.loads(capsys.readouterr().out)["skipped"]
    assert (left["file"], left["line"]) == (str(tmp_path / "b.csv"), 3) and "too far apart" in left["reason"]
    (tmp_path / "b.csv").write_text(f"{head}\n{far}\n{good},7\n")
    assert _run(["plan", "calibrate", str(tmp_path / "b.csv")], debug=False) == 2
    said = capsys.readouterr().err
    assert "1 row too far from the prediction, the first " in said and "1 row cannot be read, the first " in said


def test_factors_in_a_runs_folder_are_written_again_and_nothing_else_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", 3.0)
    _join_commands()
    for _ in range(2):
        assert _run(["plan", "calibrate", str(run), "--out", str(run / "factors.json")], debug=False) == 0
    (run / "notes.json").write_text('{"groups": []}')
    for name in ("notes.json", "run.yaml", "metrics.jsonl"):
        assert _run(["plan", "calibrate", str(run), "--out", str(run / name)], debug=False) == 2
    assert (run / "notes.json").read_text() == '{"groups": []}'
