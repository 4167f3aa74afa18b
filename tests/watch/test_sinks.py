"""Sinks write what they were told, all of it, and a resume leaves no curve that runs twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.account.events import EvalLine, SessionStart, StepLine
from headway.record.folder import RunFolder
from headway.record.jsonl import read_jsonl
from headway.record.sessions import read_history
from headway.watch.metrics_sink import MetricsSink
from headway.watch.tensorboard_sink import TensorboardSink, step_scalars
from watch.run_maker import Maker


def made(tmp_path: Path) -> Maker:
    maker = Maker(tmp_path / "made", steps=12, skip_at=5)
    maker.start()
    maker.run(8, eval_every=4)
    maker.save(6)
    maker.start(resumed_from=6, gap_s=10.0)
    maker.run(12, eval_every=4)
    maker.end()
    maker.close()
    return maker


def test_metrics_hold_every_line_as_told(tmp_path: Path) -> None:
    from headway.account.events import Line

    lines = made(tmp_path).lines
    folder = RunFolder(tmp_path / "run").create()
    sink = MetricsSink(folder)
    for line in lines:
        sink.tell(line)
    sink.close()
    assert read_jsonl(folder.metrics, Line).items == lines
    assert [line.step for line in read_history(folder).kept] == list(range(1, 13))


def test_a_second_session_continues_after_a_torn_line(tmp_path: Path) -> None:
    from headway.account.events import Line

    lines = made(tmp_path).lines
    folder = RunFolder(tmp_path / "run").create()
    first = MetricsSink(folder)
    first.tell(lines[0])
    first.close()
    with folder.metrics.open("ab") as file:
        file.write(b'{"v":1,"event":"step","sess')
    second = MetricsSink(folder)
    second.tell(lines[1])
    second.close()
    found = read_jsonl(folder.metrics, Line)
    assert found.items == lines[:2] and len(found.bad) == 1


def events(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    found.Reload()
    for tag in found.Tags()["scalars"]:
        steps = [item.step for item in found.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag} runs twice over steps that were done again"
    return {tag: {item.step: item.value for item in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_back_every_kept_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    lines = made(tmp_path).lines
    # Each session is a process of its own: it opens its own writer.
    second = next(i for i, line in enumerate(lines) if isinstance(line, SessionStart) and line.session == 1)
    for part in (lines[:second], lines[second:]):
        sink = TensorboardSink(tmp_path / "tb")
        for line in part:
            sink.tell(line)
        sink.close()
    found = events(tmp_path / "tb")
    kept = {line.step: line for line in lines if isinstance(line, StepLine) and (line.session == 1 or line.step <= 6)}
    nll = {step: line.nll for step, line in kept.items() if line.nll is not None}
    assert found["train/nll"] == pytest.approx(nll, rel=1e-6)
    assert 5 not in found["train/loss"], "a skipped step must not show a loss"
    assert sorted(found["train/lr"]) == list(range(1, 13))
    assert found["throughput/trained_tokens_per_s"][12] == pytest.approx(
        kept[12].trained_tokens / (kept[12].wall_ns / 1e9), rel=1e-6
    )
    assert set(found["eval/nll"]) == {line.step for line in lines if isinstance(line, EvalLine)}
    assert found["checkpoint/seconds"] == pytest.approx({6: 1.4})


def test_account_shares_sum_to_one(tmp_path: Path) -> None:
    for line in made(tmp_path).lines:
        if isinstance(line, StepLine):
            scalars = step_scalars(line)
            shares = [value for tag, value in scalars.items() if tag.startswith("account/")]
            assert sum(share or 0.0 for share in shares) == pytest.approx(1.0)
            assert {"throughput/slots_per_s", "throughput/tokens_per_s", "throughput/mfu"} <= set(scalars)


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"pip install headway\[sinks\]"):
        TensorboardSink(tmp_path)


def test_an_observer_told_out_of_order_says_so(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    lines = made(tmp_path).lines
    with pytest.raises(RuntimeError, match="SessionStart"):
        TensorboardSink(tmp_path / "tb").tell(lines[1])
