"""Claims: the two founding cases from first principles, planted contradictions, and bad input."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cli.main import _join_commands, _run
from headway.plan.claim import Finding, claim_from, load_claim
from headway.plan.claim_speedup import check_speedup, ends
from headway.plan.claim_step import bubble_ratio, check_step, flops_per_token, ring_ratio


def found(name: str) -> dict[str, Finding]:
    claim = load_claim([name])
    return {finding.what: finding for finding in (*check_step(claim), *check_speedup(claim))}


def test_1024_utilisation_is_21_to_22_percent_and_41_of_compute() -> None:
    finding = found("case-1024")["MFU"]
    assert finding.verdict == "does not fit"
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%", finding.says)]
    assert shares == [21.3, 22.0, 40.9, 47.0]
    by_hand = 6 * 1e12 * 512 * 4096 / (1024 * 989e12 * 58.3)
    assert by_hand == pytest.approx(0.213, abs=0.0005)
    assert by_hand * 58.3 / 30.4 == pytest.approx(0.41, abs=0.005)


def test_1024_bubble_of_64_stages_is_one_fifth_as_a_fraction_and_a_quarter_as_a_ratio() -> None:
    ratio = bubble_ratio(64, 256)
    assert ratio == pytest.approx(0.246, abs=0.0005)
    assert ratio / (1 + ratio) == pytest.approx(0.197, abs=0.0006)
    deep = found("case-1024")["bubble at PP64"]
    assert "24.6%" in deep.says and "19.7%" in deep.says and "fraction" in deep.says


def test_1024_says_which_figures_cannot_all_be_true() -> None:
    findings = found("case-1024")
    assert findings["the parts"].verdict == "fits"
    assert findings["both bubbles"].verdict == "does not fit"
    assert findings["bubble at PP32"].verdict == "does not fit"
    assert findings["the bubble's place"].verdict == "does not fit"
    assert findings["TP8 / TP4 communication"].verdict == "does not fit"
    assert "1.17" in findings["TP8 / TP4 communication"].says and "2.33" in findings["TP8 / TP4 communication"].says
    assert "77%" in findings["after tuning"].says and "33.7%" in findings["after tuning"].says


def test_a_ring_carries_seven_sixths_from_four_to_eight() -> None:
    assert ring_ratio(4, 8) == pytest.approx(7 / 6)


def test_halving_the_pipeline_explains_the_claimed_ratio() -> None:
    said = {"from": 4, "to": 8, "ratio": 2.3, "pp_from": 64, "pp_to": 32}
    assert next(check_step(claim_from({"tp_communication": said}, "x"))).verdict == "fits"


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("step_s", 50.0, "the parts"), ("later_step_s", 5.0, "after tuning"), ("mfu", 0.3, "MFU")],
)
def test_planted_contradictions_are_caught(key: str, value: float, what: str) -> None:
    honest = {
        "device": "H100", "gpus": 1024, "parameters": 7e10, "global_batch": 2048, "seq": 4096, "step_s": 8.0,
        "mfu": 0.44, "account": {"compute": 6.0, "comm": 2.0}, "later_step_s": 7.0,
    }  # fmt: skip
    before = {finding.what: finding.verdict for finding in check_step(claim_from(honest, "x"))}
    assert before[what] == "fits"
    after = {finding.what: finding.verdict for finding in check_step(claim_from({**honest, key: value}, "x"))}
    assert after[what] == "does not fit"


def test_27b_tokens_and_the_gain() -> None:
    says = found("case-27b")["tokens"].says
    assert "261.6 M" in says and "1,308 a sample" in says and "6.03" in says and "56,620" in says


def test_27b_cards_that_make_both_ends_possible() -> None:
    rows = {(row.device, row.cards): row for row in ends(load_claim(["case-27b"]))}
    eight = rows["H100-SXM-80GB", 8]
    assert eight.before == pytest.approx(6 * 27e9 * 9396 / (8 * 989e12), rel=0.001)
    assert eight.after_if_all_real > 1  # so some of the first run's tokens must have been padding
    assert 0.4 < eight.least_padding < 0.5 and eight.possible
    assert rows["H100-SXM-80GB", 16].least_padding == 0
    assert not rows["H100-SXM-80GB", 1].possible and not rows["H100-SXM-80GB", 2].possible
    assert not rows["A100-SXM-80GB", 4].possible
    assert not rows["H100-SXM-80GB", 4].fits_memory


@settings(deadline=None)
@given(padding=st.floats(0, 0.83))
def test_the_gain_splits_into_packing_times_kernels(padding: float) -> None:
    for row in ends(load_claim(["case-27b"])):
        packing, kernels = row.split(padding)
        assert packing * kernels == pytest.approx(27840 / 4620)


@settings(deadline=None)
@given(parameters=st.floats(1e9, 2e12), seq=st.floats(1024, 131072))
def test_attention_only_adds_flops(parameters: float, seq: float) -> None:
    low, high = flops_per_token(parameters, seq)
    assert low == 6 * parameters < high


def headway(*arguments: str) -> int:
    _join_commands()
    return _run(["plan", "check-claim", *arguments], debug=False)


def test_the_command_ends_with_1_when_figures_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert headway("case-1024") == 1
    assert "do not fit" in capsys.readouterr().out
    assert headway("case-27b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["contradictions"] == 0


def test_a_claim_in_words_and_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        headway("device=H100", "gpus=8", "parameters=8e9", "global_batch=64", "seq=8192", "step_s=6", "mfu=0.53") == 0
    )
    file = tmp_path / "claim.yaml"
    file.write_text("step_s: 10\naccount: {compute: 8, comm: 1}\n")
    assert headway(str(file)) == 1
    assert headway(str(file), "account.data=1") == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["case-1025"], "known by name: case-1024, case-27b"),
        (["gpu=3"], "nearest: gpus"),
        (["step_s=fast"], "give a positive number"),
        (["device=H101", "gpus=1", "parameters=1", "global_batch=1", "seq=1", "step_s=1"], "H100-SXM-80GB"),
        (["device=A100", "precision=fp4", "gpus=1", "parameters=1", "global_batch=1", "seq=1", "step_s=1"], "no 'fp4' peak"),
        (["name=x"], "too few figures"),
        (["plans=3"], "list of mappings"),
        (["account=3"], "mapping of numbers"),
        (["mfu=-1"], "mfu is -1; give a share between 0 and 1"),
        (["gpus=0.5"], "gpus is 0.5; give a whole number of GPUs"),
        (["plans=[{pp: 0}]"], "plans.pp is 0; give a whole number"),
        (["device=@x"], "claim: device: not YAML"),
        (["plans=[{"], "claim: plans: not YAML"),
        (["name=2026-02-30"], "claim: name: not YAML"),
        (["precision=!!bool maybe"], "claim: precision: not YAML"),
        (["tp_communication={from: 1, to: 8, ratio: 2}"], "tp_communication.from is 1; give a whole number of ranks from 2"),
        (["tp_communication={from: 4, to: 0.5, ratio: 2}"], "tp_communication.to is 0.5; give a whole number of ranks"),
        (["account.idle=nan"], "account.idle is 'nan'; give a number of zero or more"),
    ],
)  # fmt: skip
def test_bad_claims_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(*words) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "key",
    ["gpus", "parameters", "global_batch", "seq", "micro_batch", "micro_batches", "step_s", "later_step_s", "tokens_per_s", "samples",
     "before.seconds", "before.tokens_per_s", "after.seconds", "after.tokens_per_s", "tp_communication.from", "tp_communication.ratio"],
)  # fmt: skip
def test_nothing_that_divides_may_be_nothing(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0", "-1", ".nan", ".inf", "true"):
        assert headway("case-1024", f"{key}={value}") == 2
        assert f"{key} is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what", "verdict"),
    [
        (["step_s=8", "later_step_s=8", "account.compute=8"], "after tuning", "fits"),
        (["step_s=8", "later_step_s=7", "account.compute=8"], "after tuning", "does not fit"),
        (["plans=[{pp: 8, bubble: 0.005}, {pp: 16, bubble: 0.01}]"], "both bubbles", "fits"),
        (["plans=[{pp: 8, bubble: 0.99001}, {pp: 16, bubble: 0.1}]"], "both bubbles", "does not fit"),
        (["plans=[{pp: 8, bubble: 0.5}, {pp: 8, bubble: 0.1}]"], "both bubbles", "does not fit"),
    ],
)  # fmt: skip
def test_figures_at_their_ends(words: list[str], what: str, verdict: str) -> None:
    """Compute that is the whole step, a bubble that is rounded from nothing or to everything, one depth twice."""
    assert {one.what: one.verdict for one in check_step(load_claim(words))}[what] == verdict


def test_no_figures_that_are_taken_end_in_anything_but_a_line() -> None:
    """Every number that the reader takes, at the ends of its kind, in any company."""
    draw = random.Random(0)
    shares, sizes = (1e-12, 0.005, 0.5, 0.99001, 0.995), (1e-20, 0.5, 1, 2, 8, 1024, 1e12, 1e20)
    whole = (1, 2, 8, 1024)
    counts = ("gpus", "global_batch", "seq", "micro_batch")
    free = ("parameters", "active_parameters", "micro_batches", "step_s", "later_step_s", "tokens_per_s", "samples")
    for _ in range(400):
        content = {name: draw.choice(whole) for name in counts} | {name: draw.choice(sizes) for name in free}
        content |= {"mfu": draw.choice(shares), "device": "H100"}
        content |= {
            end: {"seconds": draw.choice(sizes), "tokens_per_s": draw.choice(sizes)} for end in ("before", "after")
        }
        content["account"] = {name: draw.choice((0, *sizes)) for name in ("compute", "comm.dp", "data", "idle")}
        content["account"]["compute"] = draw.choice((content["step_s"], content["account"]["compute"]))
        degrees = {name: draw.choice(whole[1:]) for name in ("from", "to", "pp_from", "pp_to")}
        content["tp_communication"] = {**degrees, "ratio": draw.choice(sizes)}
        plans = [{name: draw.choice(whole) for name in ("tp", "pp", "dp", "vpp")} for _ in range(2)]
        content["plans"] = [{**plan, "bubble": draw.choice(shares)} for plan in plans]
        kept = {name: content[name] for name in draw.sample(sorted(content), draw.randint(6, len(content)))}
        claim = claim_from(kept, "x")
        assert all(one.says and "\n" not in one.says for one in (*check_step(claim), *check_speedup(claim)))
