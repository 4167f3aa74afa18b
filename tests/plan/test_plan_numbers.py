"""Every number and every file that `headway plan` takes, by whichever way: what it cannot be ends in one line that names it.

The options are walked by their signatures, so that a new one is tested (or fails here) without anybody thinking of it.
"""

from __future__ import annotations

import json
import math
import types
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.cli import plan as plan_commands
from headway.cli.main import _run
from headway.plan import numbers
from headway.plan.calibrate import load_calibration
from headway.plan.cluster import cluster_from, find_device
from headway.plan.constants import default_constants
from headway.plan.goodput_cases import Figure
from headway.plan.money import days
from headway.plan.numbers import AMOUNT, COUNT, POSITIVE, SHARE, Kind
from headway.plan.rows import read_cases
from headway.plan.scaling_law import read_losses
from headway.plan.table import read_table
from plan_line import joined, refused  # noqa: F401 (joined is a fixture)

NEEDED = {
    "": ("--model", "llama3-8b", "--cluster", "H100x8"),
    "explain": ("--model", "llama3-8b", "--cluster", "H100x8"),
    "sweep": ("--model", "llama3-8b", "--cluster", "H100"),
    "shrink": ("--target", "llama3-8b", "--cluster", "H100x8"),
    "validate": ("rows.csv",),
    "calibrate": ("rows.csv",),
    "check-claim": ("gpus=8",),
    "goodput": (),
}


def options(*kinds: type) -> list[tuple[str, str]]:
    """(sub-command, option) of every option that holds one of these types."""
    found = []
    commands = {"": plan_commands.app.registered_callback.callback}
    commands |= {one.name or one.callback.__name__: one.callback for one in plan_commands.app.registered_commands}
    assert set(commands) == set(NEEDED)
    for command, function in commands.items():
        for name, hint in get_type_hints(function, include_extras=True).items():
            plain = hint.__origin__ if hasattr(hint, "__metadata__") else hint
            held = get_args(plain) if get_origin(plain) in (types.UnionType, list) else (plain,)
            if hasattr(hint, "__metadata__") and isinstance(hint.__metadata__[0], typer.models.OptionInfo):
                found += [(command, "--" + name.replace("_", "-"))] if set(held) & set(kinds) else []
    return found


NUMERIC, FILES = options(int, float), options(Path)


def test_the_walk_finds_what_there_is() -> None:
    assert {("goodput", "--price"), ("goodput", "--repair"), ("sweep", "--tokens"), ("validate", "--worst")} <= set(
        NUMERIC
    )
    assert {("", "--html"), ("calibrate", "--out"), ("shrink", "--write-config"), ("sweep", "--calibrate")} <= set(
        FILES
    )
    assert len(NUMERIC) > 40


@pytest.mark.parametrize(("command", "option"), NUMERIC)
def test_no_numeric_option_takes_what_is_no_such_number(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("nan", "inf", "-inf", "-1", "1e99", "text", ""):
        said = refused(capsys, *filter(None, (command,)), *NEEDED[command], option, value)
        assert f"Invalid value for '{option}'" in said and " is not a " in said


@pytest.mark.parametrize(("command", "option"), FILES)
def test_no_option_takes_a_file_that_cannot_be_one(
    command: str, option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    values = ["", "\0"]
    if option in ("--html", "--out", "--write-config"):
        values += [str(tmp_path), str(tmp_path / "file" / "below")]
    for value in values:
        assert option in refused(capsys, *filter(None, (command,)), *NEEDED[command], option, value)


def test_arguments_that_name_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "an empty name" in refused(capsys, "validate", "")
    assert "an empty name" in refused(capsys, "calibrate", "")
    assert "no such file" in refused(capsys, "calibrate", "none.csv")


KINDS = [kind for kind in vars(numbers).values() if isinstance(kind, Kind)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.one_of(st.floats(), st.integers(), st.text(max_size=6), st.booleans(), st.none()))
def test_a_kind_gives_a_finite_number_inside_its_bounds_or_says_what_it_wants(kind: Kind, value: Any) -> None:
    try:
        number = kind.read(value)
    except ValueError as error:
        assert kind.says in str(error)
        return
    assert math.isfinite(number) and kind.least <= number <= kind.most and not isinstance(value, bool)
    assert isinstance(number, int) if kind.whole else isinstance(number, float)
    assert number == float(value)  # read, never rounded


def test_numbers_at_the_edges() -> None:
    assert (COUNT.read("1e3"), COUNT.read(8.0), POSITIVE.read("15e12"), SHARE.read("1"), AMOUNT.read(0)) == (
        1000,
        8,
        15e12,
        1,
        0,
    )
    for kind, value in ((COUNT, "8.5"), (COUNT, "0"), (POSITIVE, "0"), (SHARE, "0"), (AMOUNT, "-0.1"), (COUNT, True)):
        with pytest.raises(ValueError, match="is not"):
            kind.read(value)


HEADER = "model,gpu,gpus,layers,hidden,heads,kv_heads,vocab,seq_len,tp,pp,micro_batch,global_batch,step_time_s,tokens_per_s_per_gpu,fsdp"
ROW = dict(zip(HEADER.split(","), "Own,H100,8,32,4096,32,8,128256,8192,1,1,1,64,2.5,,0".split(","), strict=True))


def rows(path: Path, *changes: dict[str, str]) -> Path:
    path.write_text("\n".join([HEADER, *(",".join({**ROW, **change}.values()) for change in changes)]) + "\n")
    return path


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("gpus", "8.5", "column gpus: '8.5' is not a whole number of GPUs"),
        ("gpus", "eight", "column gpus: 'eight' is not a whole number of GPUs"),
        ("tp", "1.5", "column tp: '1.5' is not a whole number"),
        ("tp", "3", "column tp: 3 does not divide 32 heads"),
        ("heads", "24", "column heads: 24 does not divide hidden 4096"),
        ("kv_heads", "5", "column kv_heads: 5 does not divide 32 heads"),
        ("seq_len", "-2048", "column seq_len: '-2048' is not a whole number"),
        ("hidden", "4096.5", "column hidden: '4096.5' is not"),
        ("micro_batch", "0", "column micro_batch: '0' is not"),
        ("step_time_s", "-3", "column step_time_s: '-3' is not a positive number"),
        ("step_time_s", "nan", "column step_time_s: 'nan' is not a positive number"),
        ("step_time_s", "inf", "column step_time_s: 'inf' is not a positive number"),
        ("step_time_s", "0", "column step_time_s: '0' is not a positive number"),
        ("tokens_per_s_per_gpu", "fast", "column tokens_per_s_per_gpu: 'fast' is not"),
        ("fsdp", "maybe", "column fsdp: 'maybe' is not"),
        ("model", "Own,8", "17 fields under a header of 16"),
    ],
)
def test_a_cell_that_cannot_be_is_named_and_never_calibrates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, value: str, says: str
) -> None:
    path = rows(tmp_path / "rows.csv", {}, {column: value})
    cases, skipped = read_cases(path)
    assert [case.row_id for case in cases] == ["rows.csv:2"]
    assert (skipped[0].row_id, skipped[0].line) == ("rows.csv:3", 3) and says in skipped[0].reason
    found = load_calibration(path, default_constants())
    assert [used for ids in found.rows.values() for used in ids] == ["rows.csv:2"] and found.skipped == tuple(skipped)
    assert _run(["plan", "validate", str(path)], debug=False) == 0
    assert says in (out := capsys.readouterr().out) and "rows.csv:3" in out and "1 skipped" in out
    assert _run(["plan", "calibrate", str(path)], debug=False) == 0
    assert f"skipped: {path}:3: " in (out := capsys.readouterr().out) and says in out
    assert "assumed" not in out  # of run folders alone


def test_words_for_blank_and_degrees_of_none_are_blank(tmp_path: Path) -> None:
    cases, skipped = read_cases(
        rows(tmp_path / "rows.csv", {"kv_heads": "n/a", "fsdp": "no", "micro_batch": "-"}, {"seq_len": "8k"})
    )
    assert not skipped and cases[0].layout.zero == 1 and cases[1].work.seq == 8192


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('a,b\n1,2\n3,"4\n5,6\n', "t.csv: line 3: .* is a quote not closed there"),
        ('a,b\n"1"x,2\n', "t.csv: line 2: "),
        ("a,b,a\n1,2,3\n", "column 'a' is there twice"),
        ("", "t.csv: empty"),
        ("a,b\n", "a header and no rows"),
        ("b\n1\n", "column 'a' is missing"),
    ],
)
def test_a_table_that_cannot_be_read_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_table(path, "t.csv", ("a",), "give a CSV")


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('A b;c\n1;"x\ny"\n\n2;z;3\n4\n')
    found = read_table(path, "t.csv", ("a_b",), "")
    assert [(one.number, one.cells["a_b"]) for one in found] == [(2, "1"), (5, "2"), (6, "4")]
    assert [bool(one.fault) for one in found] == [False, True, True] and found[0].cells["c"] == "x\ny"


@pytest.mark.parametrize(
    ("row", "says"), [("1e9,nan,3", "column d: nan is not"), ("1e9,1e10", "2 fields"), ("0,1,2", "column n: 0")]
)
def test_losses_name_line_and_column(tmp_path: Path, row: str, says: str) -> None:
    path = tmp_path / "losses.csv"
    path.write_text(f"N,D,loss\n1e9,1e10,3\n{row}\n")
    with pytest.raises(UserError, match=f"losses.csv:3: {says}"):
        read_losses(path)


def test_a_config_of_another_name_is_called_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"model_type": "llama", "hidden_size": 64}')
    said = refused(capsys, "--model", str(path), "--cluster", "H100x8")
    assert f"--model {path}: (llama): key " in said and "config.json" not in said


def test_broken_bench_json_is_said_before_anything_else_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    path.write_text("{")
    assert "not JSON" in refused(capsys, "calibrate", str(path))


def test_a_given_peak_takes_its_ceiling_along_and_no_ceiling_lies_above_it() -> None:
    usual, half = find_device("H100"), cluster_from({"device": "H100", "gpus": 8, "bf16_tflops": 494.7}).device
    assert half.measured["bf16"] / half.rates["bf16"] == pytest.approx(usual.measured["bf16"] / usual.rates["bf16"])
    assert half.rates["fp16"] == pytest.approx(half.rates["bf16"]) and half.rates["fp8"] == usual.rates["fp8"]
    with pytest.raises(UserError, match="'measured_bf16_tflops' is 5000, above the peak"):
        cluster_from({"device": "H100", "gpus": 8, "measured_bf16_tflops": 5000})


def test_a_deadline_that_cannot_be_met_is_said_with_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    fix = "pp=1,tp=1,cp=1,micro_batch=1,zero=3,recompute=full"
    line = ["plan", *NEEDED[""], "--global-batch", "8", "--tokens", "1e9", "--fix", fix, "--deadline"]
    for deadline, said in (("1s", "1 second"), ("150s", "2.5 minutes")):
        assert _run([*line, deadline], debug=False) == 1
        assert f"no plan meets the deadline of {said}: the fastest takes " in capsys.readouterr().out


def test_durations_are_said_in_the_unit_they_fill_twice() -> None:
    said = {0.5: "0.5 seconds", 1: "1 second", 119: "119 seconds", 120: "2.0 minutes", 7199: "120.0 minutes", 7200: "2.0 hours",
            172_799: "48.0 hours", 172_800: "2.0 days", 34.2 * 86400: "34.2 days"}  # fmt: skip
    assert {seconds: days(seconds) for seconds in said} == said


def test_a_bound_that_holds_says_so() -> None:
    assert Figure("share", 90, 91.22, "%", ">").line() == "share: published > 90 %, model 91.22 % (holds)"
    assert Figure("share", 90, 81, "%", ">").line().endswith("(does not hold, -10.0%)")


def test_ids_that_come_twice_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([f"row_id,{HEADER}", *[",".join(["a", *ROW.values()])] * 2]) + "\n")
    assert [case.row_id for case in read_cases(path)[0]] == ["a", "a in line 3"]


def test_explain_is_calibrated_as_the_plan_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factors = tmp_path / "f.json"
    group = '{"stack": "x", "device": "H100-SXM-80GB", "precision": "bf16", "factor": 2}'
    factors.write_text(f'{{"groups": [{group}]}}')
    line = [
        *NEEDED["explain"],
        "--global-batch",
        "8",
        "--fix",
        "tp=1,pp=1,cp=1,micro_batch=1,zero=3,recompute=full",
        "--json",
    ]
    steps = []
    for more in ([], ["--calibrate", str(factors)]):
        assert _run(["plan", "explain", *line, *more], debug=False) == 0
        steps.append(json.loads(capsys.readouterr().out)["best"]["step_s"])
    assert steps[1] == pytest.approx(2 * steps[0])
