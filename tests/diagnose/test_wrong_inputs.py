"""What a user may give by mistake: told in one line, never diagnosed as something else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from diagnose.causes import ranks
from diagnose.kineto_maker import Kineto, clean
from diagnose.test_findings import diagnosed, found
from diagnose.test_run_folders import made
from headway.account.errors import UserError
from headway.diagnose.classify import comm_pattern, kind_of
from headway.diagnose.compare import compare
from headway.diagnose.efficiency import read_model, with_efficiency
from headway.diagnose.facts import KINDS
from headway.diagnose.hostwork import _kind as op_kind
from headway.diagnose.job import Options, read_job
from headway.diagnose.open import open_diagnosis
from headway.diagnose.said import Said
from headway.watch.diagnosis_text import facts


def host_first(devices: list[dict[str, object]]) -> bytes:
    """As Kineto writes it: what was recorded on, then all host events, then those of the GPU."""
    thread = {"ph": "X", "pid": 1, "tid": 1}
    host = [{**thread, "cat": "cpu_op", "name": "aten::mm", "ts": 10 * i, "dur": 9} for i in range(50)]
    gpu = [
        {**thread, "cat": "kernel", "name": "gemm", "ts": 10 * i, "dur": 9, "args": {"stream": 7}} for i in range(50)
    ]
    return json.dumps({"schemaVersion": 1, "deviceProperties": devices, "traceEvents": host + gpu}).encode()


@pytest.mark.parametrize("share", [0.2, 0.35, 0.45])
def test_a_trace_cut_off_before_its_gpu_events_is_no_cpu_trace(share: float, tmp_path: Path) -> None:
    whole = host_first([{"id": 0, "name": "NVIDIA H100"}])
    (tmp_path / "t.json").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"cut off before its GPU events.*NVIDIA H100"):
        read_job([tmp_path / "t.json"])
    alone = host_first([])
    (tmp_path / "cpu.json").write_bytes(alone[: int(share * len(alone))])
    assert read_job([tmp_path / "cpu.json"]).ranks[0].device().kind == "cpu"
    (tmp_path / "whole.json").write_bytes(whole)
    assert read_job([tmp_path / "whole.json"]).ranks[0].device().kind == "gpu"


def test_a_device_of_which_nothing_is_known_is_refused(tmp_path: Path) -> None:
    job = read_job([clean().write(tmp_path / "t.json.gz")])
    with pytest.raises(UserError, match=r"--device 'NVIDIA H10000': no datasheet row"):
        with_efficiency(job, Said(device="NVIDIA H10000"))
    assert with_efficiency(job, Said(device="NVIDIA H200")).ranks


def test_a_file_given_twice_is_not_two_ranks(tmp_path: Path) -> None:
    path = clean().write(tmp_path / "t.json.gz")
    with pytest.raises(UserError, match="given twice"):
        open_diagnosis([path, tmp_path / "." / "t.json.gz"], Options(), Said())


def test_a_folder_is_a_run_or_holds_traces(tmp_path: Path) -> None:
    clean(2).write(tmp_path / "job" / "traces" / "a.json.gz")
    assert open_diagnosis([tmp_path / "job" / "traces"], Options(), Said()).kind == "trace"
    with pytest.raises(
        UserError, match=r"neither a run folder .*; traces lie further below: give them, .*traces/\*\.gz"
    ):
        open_diagnosis([tmp_path / "job"], Options(), Said())
    run = made(tmp_path / "runs" / "one")
    with pytest.raises(UserError, match=r"\*\.json\.gz\); a run folder lies below: .*runs/one$"):
        open_diagnosis([tmp_path / "runs"], Options(), Said())
    trace = clean(2).write(run.traces / "step-00000004" / "rank-00000.json.gz")
    (trace.parent / "diagnosis.json").write_text("{}")
    with pytest.raises(UserError, match=r"give them, .*step-00000004/\*\.gz$"):
        open_diagnosis([run.traces], Options(), Said())
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"nor one of traces \(no \*\.json or \*\.json\.gz\)$"):
        open_diagnosis([tmp_path / "none"], Options(), Said())


def test_a_json_that_is_no_model_is_named(tmp_path: Path) -> None:
    for text in ('{"a": 1}', "[]", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"^--model .*config\.json: "):
            read_model(tmp_path / "config.json")


def test_options_of_traces_are_said_to_be_unused_on_a_run_folder(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    said = Said(tokens=5, device="anything")
    assert any(
        note.startswith("--tokens, --device: not used") for note in open_diagnosis([folder.root], Options(), said).notes
    )
    assert not any("not used" in note for note in open_diagnosis([folder.root], Options(), Said()).notes)


def test_unlike_things_are_compared_with_a_warning(tmp_path: Path) -> None:
    run = open_diagnosis([made(tmp_path / "run").root], Options(), Said())
    one = open_diagnosis([clean().write(tmp_path / "a.json.gz")], Options(), Said())
    assert compare(one, one).notes == ()
    assert any("a trace is compared with a run" in note for note in compare(one, run).notes)


def pausing(pause_us: float) -> Kineto:
    """Twelve kernels back to back; the queue is dry once."""
    trace = Kineto()
    for number in range(12):
        trace.matmul(5.0)
        if number == 5:
            trace.host(pause_us)
    return trace


def test_one_long_wait_is_a_pause_and_no_fragmentation(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "a", pausing(400_000.0))
    assert any("one wait owns" in note and "pause" in note for note in diagnosis.notes)
    assert not diagnosis.clean and "no cause was found" in diagnosis.verdict and "idle" in diagnosis.verdict
    finding = found(diagnosis, "fragmentation")
    assert finding is None
    assert not any("one wait owns" in note for note in diagnosed(tmp_path / "b", pausing(10.0)).notes)


def test_what_counts_as_communication_is_printed(tmp_path: Path) -> None:
    job = [clean(2).write(tmp_path / "a.json.gz")]
    told = dict(facts(open_diagnosis(job, Options(comm_kernels=("flash_bwd",)), Said())))
    assert "flash_bwd" in told["comm. names"] and "--comm-kernel" in told["comm. names"]
    assert "comm. names" not in dict(facts(open_diagnosis(job, Options(), Said())))


@pytest.mark.parametrize("pattern", ["", "x*", "^", r"\b", "(?=)", "a|", " ", r"\s", "<", ".+", r"\w", "[a-z]"])
def test_a_pattern_that_matches_nothing_in_every_name_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=r"--comm-kernel .* matches every name"):
        comm_pattern((pattern,))
    for bad in ("(", "(?i)nccl"):
        with pytest.raises(UserError, match="is not a regular expression"):
            comm_pattern((bad,))
    for good in ("my_reduce", r"^my_.*<\d+>", "void my reduce"):
        assert comm_pattern((good,))
    assert comm_pattern(("my_reduce",)).search("My_Reduce_bf16")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cudnn::fusion::convert_dq_to_16bits<bf16>", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "attention"),
        ("triton_poi_fused_convert_element_type_3", "elementwise"),
        ("cudnn::cnn::conv2d_grouped_direct_kernel", "convolution"),
        ("implicit_convolve_sgemm", "convolution"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert KINDS[kind_of(name)] == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch::autograd::AccumulateGrad", "elementwise"),
        ("autograd::engine::evaluate_function: LogSoftmaxBackward0", "loss"),
        ("SoftmaxBackward0", "softmax"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::convolution_backward", "convolution"),
        ("prims::convert_element_type", "elementwise"),
    ],
)
def test_kinds_of_operators(name: str, kind: str) -> None:
    assert KINDS[op_kind(name)] == kind


def test_ranks_whose_clocks_begin_91_days_apart_are_compared(tmp_path: Path) -> None:
    """Each file's times are its own; its base makes them one clock."""
    paths = ranks(tmp_path, lambda rank, step: 900.0 if rank == 2 else 0.0)
    plain = read_job(paths).comparison
    for rank, path in enumerate(paths):
        text = json.loads(gzip.decompress(path.read_bytes()))
        base = rank * 91 * 86_400 * 10**9
        text["baseTimeNanoseconds"] = 10**18 - base
        for event in text["traceEvents"]:
            event["ts"] += base / 1000
        path.write_bytes(gzip.compress(json.dumps(text).encode()))
    moved = read_job(paths).comparison
    assert plain is not None and moved is not None and not moved.refused
    assert moved.last_arrivals == plain.last_arrivals and moved.last_arrivals[2] > 0
    assert moved.wait_ns[0] == pytest.approx(plain.wait_ns[0], rel=0.01)
