"""Published runs against the model, the facts checked against the shared table; and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.cli.main import _join_commands, _run
from headway.plan import goodput_cases
from headway.plan.failure_rates import published_rates
from headway.plan.goodput_cases import Case, Figure
from headway.plan.goodput_report import parse_tier


@pytest.fixture(scope="module")
def cases() -> tuple[Case, ...]:
    return goodput_cases.cases()


def test_every_published_figure_is_met_within_a_tenth(cases: tuple[Case, ...]) -> None:
    for case in cases:
        for figure in case.figures:
            assert abs(figure.error) <= 0.10, figure.line()


def test_each_case_says_what_it_assumed(cases: tuple[Case, ...]) -> None:
    for case in cases:
        assert case.assumptions and all(
            text.split(":")[0] in ("published", "assumed", "solved") or "interval" in text for text in case.assumptions
        )
        assert any(figure.solved for figure in case.figures) == any(
            text.startswith("solved") for text in case.assumptions
        )


def test_the_figures_are_those_of_the_table(shared: Path, cases: tuple[Case, ...]) -> None:
    with (shared / "plan" / "failures.csv").open(encoding="utf-8") as file:
        rows = {row["row_id"]: row for row in csv.DictReader(file)}
    llama, bloom, dlrover, clockwork = cases
    assert llama.figures[1].published == float(rows["F002"]["job_mtbf_h"])
    assert bloom.figures[0].published == float(rows["F042"]["value"])
    assert [f"{figure.published / 100:.2f}" for figure in dlrover.figures] == rows["F058"]["goodput_or_ettr"].split(
        " -> "
    )
    assert [figure.published for figure in clockwork.figures] == [
        float(rows[row]["value"]) for row in ("F070", "F071", "F072")
    ]
    rates = {row["rate_per_gpu_day"] and float(row["rate_per_gpu_day"]) for row in rows.values()}
    assert {row.per_gpu_day for row in published_rates()} <= rates


def test_a_wrong_model_would_be_seen() -> None:
    assert abs(Figure("x", 818.0, 593.0, "min").error) > 0.10  # a restart of 15 minutes, as the vendor says elsewhere
    assert Figure("x", 90.0, 88.0, "%", ">").error < 0
    assert Figure("x", 90.0, 99.0, "%", ">").error == 0


def headway(*arguments: str) -> int:
    _join_commands()
    return _run(["plan", "goodput", *arguments], debug=False)


def test_the_command_prints_ettr_and_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert headway("--gpus", "1024", "--step", "12", "--price", "3", "--rate", "llama3-405b") == 0
    text = capsys.readouterr().out
    assert "ETTR" in text and "Young" in text and "assumed:" in text and "dollars" in text and "spare nodes" in text


def test_json_holds_an_account_that_closes(capsys: pytest.CaptureFixture[str]) -> None:
    assert headway("--gpus", "4096", "--json", "--simulate", "--tier", "memory:save=1,survives=0.8") == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["account"]["parts"].values()) == found["account"]["wall_ns"]
    assert found["ettr"] == pytest.approx(found["simulated"]["mean"], abs=0.006)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tier", "memory:sve=1"], "nearest: save"),
        (["--tier", "memory"], "write NAME:save=SECONDS"),
        (["--tier", "memory:save=x,survives=1"], "save: x is not a number"),
        (["--rate", "llama4"], "no published failure rate"),
        (["--rate", "7"], "between 0 and 1"),
        (["--tier", "memory:save=nan,survives=0.5"], "--tier 'memory:save=nan,survives=0.5': save: nan is not"),
        (["--tier", "memory:save=1,survives=1.5"], "survives: 1.5 is not a share"),
        (["--rate", "nan"], "--rate 'nan'"),
        (["--gpus", "0"], "'--gpus': 0 is not"),
        (["--failures", "3"], "GPU-days"),
        (["--interval", "-5"], "--interval"),
        (["--days", "0"], "'--days': 0 is not"),
        (["--gpus", "3000000", "--detect", "3600"], "recovery takes 4.02e+03 s: such a run never gets on"),
        (["--step", "1e6"], "a step takes 1e+06 s, and only whole ones can be saved"),
        (["--interval", "1e7"], "a save is made every 1e+07 s"),
        (["--save", "1e6"], "a save takes 1e+06 s until it is durable"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(*arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_tier_is_read() -> None:
    tier = parse_tier("disk:save=2,lag=30,load=60,survives=0.9,interval=600")
    assert (tier.name, tier.save_s, tier.lag_s, tier.load_s, tier.survives, tier.interval_s) == (
        "disk",
        2,
        30,
        60,
        0.9,
        600,
    )
    with pytest.raises(UserError, match="survives"):
        parse_tier("disk:save=2")
