"""The real traces of one H200: the naive loop's causes in their order, the long-context one nearly clean."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diagnose.real_traces import diagnosed
from headway.cli.diagnose import register
from headway.diagnose.diagnosis import Diagnosis
from headway.diagnose.padding import slots_of_grids


def of(shared: Path, name: str, tokens: int | None = None) -> Diagnosis:
    return diagnosed(shared / "traces" / "h200" / name, tokens=tokens)


def test_the_naive_loop(shared: Path) -> None:
    plain = of(shared, "trace_naive_sdpa.json.gz")
    assert [item.name for item in plain.findings if not item.within] == ["fragmentation", "loss-unfused"]
    assert "unfused elementwise" in plain.findings[0].title and "launch-bound" in plain.findings[0].title
    assert [item.name for item in plain.findings if item.within] == ["optimizer-not-fused"]
    told = of(shared, "trace_naive_sdpa.json.gz", tokens=5350)
    assert [item.name for item in told.findings if not item.within] == ["padding", "fragmentation", "loss-unfused"]
    assert "11,921 slots" in told.findings[0].evidence[0]


def test_the_long_context_loop_is_nearly_clean(shared: Path) -> None:
    diagnosis = of(shared, "trace_compile16k.json.gz")
    assert diagnosis.clean
    assert [item.label for item in diagnosis.largest[:2]] == ["attention backward", "loss"]
    assert "attention backward" in diagnosis.verdict and "loss" in diagnosis.verdict


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("kineto/resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz", "data-starvation"),
        ("tracelens/mi300__ddp_resnet18_no_pool__train_resnet18.json.gz", "allocator"),
        ("tracelens/h100__google_owlv2-large-patch14-ensemble__1016001.json.gz", "data-starvation"),
    ],
)
def test_real_traces_with_a_known_fault(shared: Path, file: str, name: str) -> None:
    diagnosis = diagnosed(shared / "traces" / file)
    assert diagnosis.findings[0].name == name


def test_a_planted_straggler_is_named_and_balanced_ranks_are_not_accused(shared: Path) -> None:
    folder = shared / "traces" / "local_torch213"
    slow = diagnosed(*sorted(folder.glob("straggler_rank*.gz")))
    assert any(item.name == "straggler-constant" and "rank 1" in item.title for item in slow.findings)
    even = diagnosed(*sorted(folder.glob("balanced_rank*.gz")))
    assert not [item for item in even.findings if item.name == "straggler-constant"]


def test_slots_are_read_from_the_loss_kernels_grid_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.diagnose import padding

    event = (
        '{"ph": "X", "name": "void cunn_SoftMaxForward<4, float>(float*)", "args": {"stream": 7, "grid": [%d, 1, 1]}}'
    )
    filler = '{"ph": "X", "name": "other", "args": {"grid": [9, 1, 1]}}'
    path = tmp_path / "trace.json"
    path.write_text("[" + ",\n".join([filler, event % 100, filler, event % 23, filler] * 3) + "]")
    for size in (1 << 24, 64, 333):
        monkeypatch.setattr(padding, "_CHUNK", size)
        monkeypatch.setattr(padding, "_EVENT", 256)
        assert slots_of_grids(path) == 3 * 123


def test_the_command_prints_and_exits(tmp_path: Path) -> None:
    import typer

    from diagnose import causes

    app = typer.Typer()
    register(app)
    path = causes.fragmented().write(tmp_path / "trace.json.gz")
    done = CliRunner().invoke(app, [str(path)])
    assert done.exit_code == 0
    assert "operator fragmentation" in done.output and "train.compile=true" in done.output
    assert done.output.index("waterfall") < done.output.index("what to do first")
