"""`headway incidents`: groups, means and lemons agree with a slow count; the page cannot be made to speak as code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.account.events import Incident
from headway.cli.main import main
from headway.guard.ledger import Ledger
from headway.record.incidents import append_incident
from headway.record.sessions import read_history
from headway.watch.incidents import groups, is_failure, lemons, read_overview
from headway.watch.incidents_text import figures, write_post_mortem
from watch.run_maker import killed_and_resumed, plain_run


def incident(number: int, **changes: Any) -> Incident:
    known = {"fault": "hang", "step": 7, "time": 1.0, "monotonic_ns": 5, "host": "node1", "action": "restarted"}
    return Incident(id=f"id{number}", **{**known, **changes})  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 99)), max_size=20))
def test_groups_lose_and_double_nothing(rows: list[tuple[str, int, int]]) -> None:
    items = [incident(n, host=host, steps_lost=lost, step=step) for n, (host, lost, step) in enumerate(rows)]
    found = groups(items, lambda item: item.host)
    assert sum(group.count for group in found) == len(rows)
    for group in found:
        mine = [row for row in rows if row[0] == group.name]
        assert group.steps_lost == sum(lost for _, lost, _ in mine)
        assert (group.first_step, group.last_step) == (min(s for *_, s in mine), max(s for *_, s in mine))


def test_a_lemon_stands_out_and_an_even_fleet_has_none() -> None:
    fleet = [incident(number, host=f"node{number % 50}") for number in range(100)]
    assert lemons(fleet) == ()
    assert lemons([*fleet, *(incident(n, host="node7") for n in range(100, 112))]) == ("node7",)
    assert lemons([incident(n) for n in range(9)]) == (), "one host cannot be compared"


def test_a_run_with_deaths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = plain_run(tmp_path / "run")
    ledger = Ledger(run.incidents, host="node<b>7")
    killed = ledger.record("rank killed", 12, rank=1, evidence="<script>alert(1)</script>", action="restarted from …")
    ledger.amend(killed, steps_lost=3, seconds_lost=9.0, recover_s=4.0, detect_s=1.0)
    hung = ledger.record("hang", 20, rank=0, phase="data", evidence="[/a]", action="restarted", detect_s=5.0)
    ledger.amend(hung, recover_s=6.0, seconds_lost=11.0)
    ledger.record("recompiles", 30, action="training goes on")
    found = read_overview(run)
    assert (len(found.incidents), found.failures) == (3, 2) and not is_failure(found.incidents[2])
    assert found.mttr_s == pytest.approx((5.0 + 11.0) / 2) and found.mtbf_s == pytest.approx(found.wall_s / 2)
    assert [group.name for group in found.by_cause] == ["hang", "rank killed", "recompiles"]
    page = write_post_mortem(run, found).read_text()
    assert "<script>" not in page and "node&lt;b&gt;7" in page and "http" not in page.replace("http-equiv", "")
    capsys.readouterr()
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main(["incidents", str(run.root), "--html", *options])
        assert end.value.code == 0
    out = capsys.readouterr().out
    assert "MTBF" in out and "rank killed" in out and "[/a]" in out
    assert json.loads(out[out.index("{") :])["failures"] == 2
    run.metrics.unlink()  # what is there is still told
    with pytest.raises(SystemExit) as end:
        main(["incidents", str(run.root)])
    assert end.value.code == 0 and "rank killed" in capsys.readouterr().out


def test_a_run_without_incidents(tmp_path: Path) -> None:
    found = read_overview(plain_run(tmp_path / "run"))
    assert (found.failures, found.mtbf_s, found.mttr_s, found.by_host) == (0, None, None, ())
    assert "0 incidents" in write_post_mortem(plain_run(tmp_path / "other"), found).read_text()


def test_what_killed_sessions_cost_is_told(tmp_path: Path) -> None:
    """Minutes of restarts were nowhere: a killed run wrote down its lost steps alone."""
    run = killed_and_resumed(tmp_path)
    again = read_history(run).sessions[1]
    told = incident(1, fault="run killed", step=31, time=again.start.time - 9.0, action="restarted from step 20")
    append_incident(run.incidents, msgspec.structs.replace(told, steps_lost=10, seconds_lost=8.0))
    found = read_overview(run)
    compiled = again.steps[0].run_ns["compile"] / 1e9
    took = 600.0 + 15.0 + compiled  # nobody ran, start-up, the first step's warm-up
    assert found.failures == 1 and found.mttr_s == pytest.approx(took)
    assert found.by_cause[0].seconds_lost == pytest.approx(8.0 + took)
    assert (found.restarts, found.restart_s) == (1, pytest.approx(15.0 + compiled))
    assert sum(found.rest.values()) == pytest.approx(found.wall_s * (1 - (found.ettr or 0.0)))
    shown = dict(figures(found))
    assert shown["the rest"].startswith("compile") and "start-up" in shown["the rest"]
    assert shown["restarts"].startswith("1 start after the first: ")
    # Nothing is made up: the second of two lines for one start has it, one that was measured stays.
    append_incident(run.incidents, msgspec.structs.replace(told, id="id2", time=told.time - 1.0, recover_s=3.0))
    append_incident(run.incidents, msgspec.structs.replace(told, id="id3", time=told.time - 2.0))
    assert [one.recover_s for one in read_overview(run).incidents] == [pytest.approx(took), 3.0, None]
