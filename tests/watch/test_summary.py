"""The figures of a run: closed, never inflated by a resume, and honest about what does not add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from headway.account.events import Flops, Incident, RankLine, SessionEnd, SessionStart, StepLine
from headway.record.jsonl import JsonlWriter
from headway.record.sessions import read_history
from headway.watch.ranks import uneven
from headway.watch.summary import RUNNING, read_summary
from watch.run_maker import PEAK, Maker, S, killed_and_resumed, plain_run, rewrite


def test_everything_closes(tmp_path: Path) -> None:
    summary = read_summary(killed_and_resumed(tmp_path))
    assert not summary.problems and not summary.bad_lines
    assert summary.run_account is not None and summary.step_account is not None and summary.fall is not None
    assert sum(summary.run_account.parts.values()) == summary.run_account.wall_ns
    assert summary.step_account.wall_ns == summary.kept.wall_ns
    assert sum(row.share for row in summary.fall.rows[1:]) == pytest.approx(1.0, abs=1e-9)
    assert summary.run_account.wall_ns == sum(item.wall_ns for item in summary.sessions)
    for field in ("steps", "slots", "tokens", "trained_tokens", "wall_ns", "skipped_steps"):
        for part in ("kept", "lost"):
            whole = getattr(getattr(summary, part), field)
            assert whole == sum(getattr(getattr(item, part), field) for item in summary.sessions)


def test_a_resume_inflates_nothing(tmp_path: Path) -> None:
    """P39, R4, R5: steps 21 to 30 were done twice."""
    folder = killed_and_resumed(tmp_path)
    summary = read_summary(folder)
    lines = [line for session in read_history(folder).sessions for line in session.steps]
    assert len(lines) == 50 and summary.kept.steps == 40 and summary.lost.steps == 10
    once = {line.step: line for line in lines}
    assert summary.kept.trained_tokens == sum(line.trained_tokens for line in once.values())
    planted = sum(line.trained_tokens for line in lines)
    assert planted > summary.kept.trained_tokens
    assert planted == summary.kept.trained_tokens + summary.lost.trained_tokens
    assert summary.run_account is not None
    # The killed session's warm-up left `productive` before, so a lost step never takes time that is not there.
    assert summary.run_account.total("rework") == sum(
        line.wall_ns for line in lines if line.session == 0 and line.step > 20
    )
    assert [item.reason for item in summary.sessions] == ["killed", "done"]
    assert summary.sessions[1].gap_s == pytest.approx(600.0)
    paid = sum(line.wall_ns for line in once.values()) / 1e9 * PEAK
    assert summary.utilisation.mfu == pytest.approx(sum(line.flops.useful for line in once.values()) / paid)


def test_mfu_hfu_and_padded_are_told_apart(tmp_path: Path) -> None:
    summary = read_summary(plain_run(tmp_path))
    use, flops = summary.utilisation, summary.kept.flops
    paid = summary.kept.wall_ns / 1e9 * PEAK
    assert use.mfu == pytest.approx(flops.useful / paid)
    assert use.hfu == pytest.approx((flops.useful + flops.recompute) / paid)
    assert use.padded == pytest.approx((flops.useful + flops.padding) / paid)
    assert summary.fall is not None and use.mfu_wall == pytest.approx(summary.fall.useful_share)
    assert "recompute" in use.convention and use.reason == ""


def test_an_unknown_peak_gives_no_mfu_and_a_reason(tmp_path: Path) -> None:
    """R9: no figure that looks real."""
    summary = read_summary(plain_run(tmp_path, peak=None))
    assert summary.utilisation.mfu is None and summary.utilisation.hfu is None and summary.utilisation.padded is None
    assert "NVIDIA H200" in summary.utilisation.reason and "bench peak" in summary.utilisation.reason
    assert summary.fall is not None and not summary.fall.peak_known


def test_mfu_over_100_percent_is_named(tmp_path: Path) -> None:
    """P38: the planted peak is ten times too low."""
    summary = read_summary(plain_run(tmp_path, peak=PEAK / 10))
    assert any("MFU over 100 %" in problem for problem in summary.problems)
    assert any("more than the peak" in problem for problem in summary.problems)
    assert summary.fall is not None and not summary.fall.peak_known


def test_half_padded_batches_count_as_such(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)

    def half(line: Any) -> Any:
        if not isinstance(line, StepLine):
            return line
        return msgspec.structs.replace(line, tokens=line.slots // 2, trained_tokens=line.slots // 4)

    rewrite(folder, half)
    summary = read_summary(folder)
    assert summary.kept.fill == 0.5
    slots, tokens, trained = (summary.per_second(kind) or 0 for kind in ("slots", "tokens", "trained_tokens"))
    assert slots == pytest.approx(2 * tokens) == pytest.approx(4 * trained)
    assert (summary.per_second("tokens", "run") or 0) < tokens


def test_loss_is_averaged_by_token(tmp_path: Path) -> None:
    """P13: (loss sum, tokens) of (2, 1) and (90, 9) is 9.2, not 6.0."""
    maker = Maker(tmp_path, steps=20)
    maker.start()
    maker.run(20)
    folder = maker.close()

    def planted(line: Any) -> Any:
        if not isinstance(line, StepLine) or line.step < 19:
            return line
        return msgspec.structs.replace(line, nll=(2.0, 10.0)[line.step - 19], trained_tokens=(1, 9)[line.step - 19])

    rewrite(folder, planted)
    summary = read_summary(folder)
    assert summary.last_loss_steps == 2, "a tenth of the run: in a short one the last ten would hold the first"
    assert summary.last_loss == pytest.approx(9.2)


def test_a_planted_hole_in_an_account_is_reported(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)

    def hole(line: Any) -> Any:
        if isinstance(line, StepLine) and line.step == 7:
            return msgspec.structs.replace(line, account={**line.account, "data": line.account["data"] - 5})
        return line

    rewrite(folder, hole)
    summary = read_summary(folder)
    assert any("step 7 (session 0)" in problem and "does not close" in problem for problem in summary.problems)
    assert summary.step_account is not None
    assert summary.step_account.wall_ns < summary.kept.wall_ns


def test_a_run_account_that_does_not_close_is_reported(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)
    rewrite(
        folder,
        lambda line: msgspec.structs.replace(line, wall_ns=line.wall_ns + S) if isinstance(line, SessionEnd) else line,
    )
    assert any("does not close, it is 1.000 s off" in problem for problem in read_summary(folder).problems)


def test_a_step_written_twice_counts_once_and_is_reported(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)
    right = read_summary(folder).kept.trained_tokens
    rewrite(folder, lambda line: [line, line] if isinstance(line, StepLine) and line.step == 9 else line)
    summary = read_summary(folder)
    assert summary.kept.trained_tokens == right and summary.kept.steps == 40 and summary.lost.steps == 1
    assert any("did a step twice" in problem and "step 9" in problem for problem in summary.problems)


def test_productive_time_beyond_the_steps_is_reported(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)

    def twice(line: Any) -> Any:
        if not isinstance(line, SessionEnd):
            return line
        run_ns = {**line.run_ns, "productive": line.run_ns["productive"] * 2}
        return msgspec.structs.replace(line, run_ns=run_ns, wall_ns=sum(run_ns.values()))

    rewrite(folder, twice)
    assert any("productive time exceeds" in problem for problem in read_summary(folder).problems)


def test_a_torn_line_is_named_and_its_step_missed(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)
    raw = folder.metrics.read_bytes().split(b"\n")
    at = next(i for i, line in enumerate(raw) if b'"step":8,' in line and b'"event":"step"' in line)
    raw[at] = raw[at][:60]
    folder.metrics.write_bytes(b"\n".join(raw))
    summary = read_summary(folder)
    assert [number for number, _ in summary.bad_lines["metrics.jsonl"]] == [at + 1]
    assert any("a step has no line" in problem and problem.endswith("step 8") for problem in summary.problems)
    assert summary.kept.steps == 39


def test_a_damaged_start_line_loses_no_step(tmp_path: Path) -> None:
    folder = killed_and_resumed(tmp_path)
    right = read_summary(folder).kept
    raw = folder.metrics.read_bytes().split(b"\n")
    starts = [i for i, line in enumerate(raw) if b'"session_start"' in line]
    for damaged in starts:
        lines = list(raw)
        lines[damaged] = lines[damaged][:40]
        folder.metrics.write_bytes(b"\n".join(lines))
        summary = read_summary(folder)
        assert summary.kept == right, "steps without their session's start line must still count, and only once"
        assert any("start line is damaged" in problem for problem in summary.problems)
        assert summary.utilisation.mfu is None


def test_evaluations_of_lost_weights_are_dropped(tmp_path: Path) -> None:
    maker = Maker(tmp_path, steps=40)
    maker.start()
    maker.run(30, eval_every=10)
    maker.start(resumed_from=20)
    maker.run(30)
    maker.evaluate(30, nll=1.25)
    folder = maker.close()
    assert [(line.session, line.step) for line in read_summary(folder).evals] == [(0, 10), (0, 20), (1, 30)]


def test_a_run_without_steps(tmp_path: Path) -> None:
    maker = Maker(tmp_path)
    maker.start()
    folder = maker.close()
    summary = read_summary(folder)
    assert summary.status == RUNNING and summary.kept.steps == 0 and summary.fall is None
    assert summary.goodput is None and summary.utilisation.reason == "no step was done"
    folder.metrics.write_bytes(b"")
    empty = read_summary(folder)
    assert empty.sessions == () and empty.run_account is None


def test_skips_incidents_and_checkpoints_are_counted(tmp_path: Path) -> None:
    folder = plain_run(tmp_path, skip_at=4)
    writer = JsonlWriter(folder.incidents)
    writer.append(Incident(id="a", fault="loss_spike", step=3, time=1.0, monotonic_ns=1, host="h"))
    writer.close()
    summary = read_summary(folder)
    assert summary.skipped == {"no trained token in the global batch": 1} and summary.kept.skipped_steps == 1
    assert len(summary.incidents) == 1 and len(summary.checkpoints) == 1
    assert summary.account_cost == pytest.approx(1 / 2000, rel=1e-3)


def test_goodput_is_productive_over_wall(tmp_path: Path) -> None:
    summary = read_summary(killed_and_resumed(tmp_path))
    assert summary.run_account is not None
    assert summary.goodput == summary.run_account.total("productive") / summary.run_account.wall_ns


def test_json_holds_all_of_it(tmp_path: Path) -> None:
    summary = read_summary(killed_and_resumed(tmp_path, world=2, slow_rank=1))
    plain = orjson.loads(orjson.dumps(summary.to_dict()))
    assert plain["kept"]["trained_tokens"] == summary.kept.trained_tokens
    assert sum(plain["run_account"]["parts"].values()) == plain["run_account"]["wall_ns"]
    assert plain["ranks"]["world_size"] == 2 and plain["trained_tokens_per_s"] > 0
    assert plain["utilisation"]["convention"].startswith("MFU:")


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    ranks = read_summary(plain_run(tmp_path, world=4, slow_rank=2)).ranks
    assert ranks is not None and ranks.world_size == 4 and len(ranks.steps) == 40 and ranks.left_out == 0
    backward = next(row for row in uneven(ranks) if row.path == "compute.backward")
    waiting = next(row for row in uneven(ranks) if row.path == "comm.dp")
    assert backward.slowest_rank == 2 and waiting.slowest_rank != 2
    assert ranks.hosts[2] == "node-0"
    wall = ranks.parts["unaccounted"].sum() + sum(v.sum() for p, v in ranks.parts.items() if p != "unaccounted")
    assert wall == ranks.wall_ns.sum()


def test_a_rank_that_lacks_a_step_is_not_made_fast_by_it(tmp_path: Path) -> None:
    folder = plain_run(tmp_path, world=2)
    rewrite(folder, lambda line: None if line.step in (3, 4) else line, folder.rank(1), RankLine)

    def hole(line: Any) -> Any:
        return msgspec.structs.replace(line, wall_ns=line.wall_ns + 1) if line.step == 9 else line

    rewrite(folder, hole, folder.rank(0), RankLine)
    summary = read_summary(folder)
    ranks = summary.ranks
    assert ranks is not None and ranks.left_out == 3 and not np.isin([3, 4, 9], ranks.steps).any()
    assert any("rank 0, step 9" in problem for problem in summary.problems)
    assert ranks.spread[0].slowest_ns == ranks.spread[0].fastest_ns


def test_ranks_of_another_world_size_are_not_compared(tmp_path: Path) -> None:
    folder = plain_run(tmp_path, world=4)
    more = JsonlWriter(folder.metrics)
    more.append(
        SessionStart(session=1, time=2e9, resumed_from=40, world_size=2, steps=40, device="cpu", peak_flops=1e12)
    )
    more.close()
    ranks = read_summary(folder).ranks
    assert ranks is not None and ranks.world_size == 2


def test_sessions_on_different_machines_pay_their_own_peak(tmp_path: Path) -> None:
    maker = Maker(tmp_path, steps=20)
    maker.start()
    maker.run(10)
    maker.peak = 2 * PEAK
    maker.start(resumed_from=10)
    maker.run(20)
    maker.end()
    summary = read_summary(maker.close())
    paid = sum(item.kept.wall_ns / 1e9 * (item.peak_flops or 0) for item in summary.sessions)
    assert summary.utilisation.mfu == pytest.approx(summary.kept.flops.useful / paid)
    assert summary.fall is not None
    top = sum(item.wall_ns / 1e9 * (item.peak_flops or 0) for item in summary.sessions)
    assert summary.fall.top == pytest.approx(top)


def test_flops_add_up_over_steps(tmp_path: Path) -> None:
    summary = read_summary(plain_run(tmp_path))
    lines = read_history(tmp_path / "metrics.jsonl").kept
    assert summary.kept.flops == sum((line.flops for line in lines), Flops())
