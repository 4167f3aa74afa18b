"""MFU: known values, refused impossible ones, and complaints P38, P39, R2, R5 as tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.account.errors import UserError
from headway.account.events import Flops
from headway.account.flops import LoraShape, SlotLayout, document_flops, step_flops
from headway.account.mfu import ImpossibleMfu, hfu, mfu, utilisation
from headway.account.peaks import Peak, resolve_peak
from headway.account.shape import ModelShape

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
H200 = resolve_peak("NVIDIA H200", "bf16")


def test_values() -> None:
    assert mfu(5e14, 1.0, 1e15) == 0.5
    assert mfu(5e14, 2.0, 1e15, devices=2) == 0.125
    assert hfu(3e14, 1e14, 1.0, 1e15) == 0.4
    assert mfu(1e15, 1.0, 1e15) == 1.0


def test_over_one_hundred_percent_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ImpossibleMfu, match=r"MFU of 150\.0% is impossible.*headway bench peak"):
        mfu(1.5e15, 1.0, 1e15)
    with pytest.raises(ImpossibleMfu, match="HFU"):
        hfu(9e14, 2e14, 1.0, 1e15)
    assert issubclass(ImpossibleMfu, UserError)


@pytest.mark.parametrize(
    "bad", [(0.0, 1e15, 1), (-1.0, 1e15, 1), (1.0, 0.0, 1), (1.0, 1e15, 0), (float("nan"), 1e15, 1)]
)
def test_nonsense_is_no_mfu(bad: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        mfu(1e12, *bad)


def test_report_prints_values_peak_source_and_convention() -> None:
    report = utilisation(Flops(useful=4 * 10**14, padding=10**14, recompute=10**14), 1.0, H200).lines()
    assert report[0] == "MFU 40.4% · HFU 50.6% · padding counted as useful 50.6%"
    assert "1 x 989 TFLOP/s bf16 (NVIDIA H200; datasheet: NVIDIA H200 datasheet" in report[1]
    assert "convention 'causal'" in report[2] and "no input embedding, head included" in report[2]
    assert "LoRA" in utilisation(Flops(), 1.0, H200, trainable=LoraShape(8, ("q_proj",))).lines()[-1]


def test_live_report_of_an_impossible_value_is_loud_and_does_not_raise() -> None:
    found = utilisation(Flops(useful=2 * 10**15), 1.0, H200)
    assert found.mfu is None and found.lines()[0].startswith("ERROR: MFU of 202.2% is impossible")
    assert "MFU unknown" in found.lines()[1]
    too_much_recompute = utilisation(Flops(useful=9 * 10**14, recompute=3 * 10**14), 1.0, H200)
    assert too_much_recompute.hfu is None and "HFU" in too_much_recompute.problem


def test_unknown_device_has_no_mfu() -> None:
    found = utilisation(Flops(useful=10**12), 1.0, resolve_peak("Some Future GPU", "bf16"))
    assert (found.mfu, found.hfu, found.padded, found.problem) == (None, None, None, "")
    assert "peak unknown, so no MFU" in found.lines()[1]


def test_qwen3_4b_at_18225_tokens_a_second_on_one_h200() -> None:
    """By hand: 6 x (weights without the embedding, with the tied head) a token, 6 L H D n(n+1) a document."""
    shape = ModelShape.from_config(QWEN3_4B)
    weights = 36 * (2560 * 32 * 128 * 2 + 2 * 2560 * 8 * 128 + 3 * 2560 * 9728) + 151936 * 2560
    lengths = [1000] * 10 + [3000]
    by_hand = 6 * weights * sum(lengths) + sum(6 * 36 * 32 * 128 * n * (n + 1) for n in lengths)
    flops = document_flops(shape, lengths)
    assert shape.matmul_parameters == weights and flops.total == by_hand
    assert mfu(flops.total, sum(lengths) / 18_225, 989e12) == pytest.approx(by_hand / (13_000 / 18_225 * 989e12))


# --- the complaints ---


def test_p38_a_window_cannot_push_mfu_over_100_percent() -> None:
    """torchtitan PR 4300: at 60 % of the peak on windowed documents, counting whole contexts says 100 % and more."""
    window = {**QWEN3_4B, "model_type": "mistral", "sliding_window": 512}
    lengths = [65_536]
    right = document_flops(ModelShape.from_config(window), lengths).total
    seconds = right / (0.6 * 989e12)
    assert mfu(right, seconds, 989e12) == pytest.approx(0.6)
    ignoring = document_flops(ModelShape.from_config({**window, "sliding_window": None}), lengths).total
    with pytest.raises(ImpossibleMfu):
        mfu(ignoring, seconds, 989e12)


def test_p38_conventions_differ_by_the_causal_half_and_are_named() -> None:
    """maxtext 1972. The same second, two published conventions."""
    shape = ModelShape.from_config(QWEN3_4B)
    causal, full = (document_flops(shape, [32_768], convention=name).total for name in ("causal", "full-attention"))
    assert 1.3 < full / causal < 1.6
    named = utilisation(Flops(useful=full), full / 5e14, H200, convention="full-attention").lines()[-1]
    assert "'full-attention'" in named and "not halved" in named


def test_p39_and_r2_padding_is_never_useful() -> None:
    """A half-padded batch: MFU halves with it, and the figure that hides it is shown beside, named."""
    shape = ModelShape.from_config(QWEN3_4B)
    step = step_flops(shape, [512] * 8, SlotLayout.rectangular(8, 1024))
    seconds = step.computed / (0.5 * 989e12)
    found = utilisation(step.to_flops(), seconds, H200)
    assert found.padded == pytest.approx(0.5)
    assert found.mfu is not None and found.mfu < 0.25


class _Session:
    """Sums FLOPs and seconds of the same steps; what a resumed run must keep apart."""

    def __init__(self) -> None:
        self.flops, self.seconds = Flops(), 0.0

    def step(self, useful: int, seconds: float) -> None:
        self.flops, self.seconds = self.flops + Flops(useful=useful), self.seconds + seconds


def test_r5_a_resume_does_not_inflate_mfu() -> None:
    """Restored FLOPs over restarted time would double it; per session and in total it stays what it was."""
    before, after = _Session(), _Session()
    for _ in range(10):
        before.step(4 * 10**14, 1.0)
        after.step(4 * 10**14, 1.0)
    total = utilisation(before.flops + after.flops, before.seconds + after.seconds, H200)
    assert total.mfu == utilisation(after.flops, after.seconds, H200).mfu == pytest.approx(0.4045, abs=1e-4)
    planted = utilisation(before.flops + after.flops, after.seconds, H200)
    assert planted.mfu is not None and planted.mfu > 0.8


def test_r9_an_unknown_gpu_never_gets_a_neighbours_peak() -> None:
    peak = resolve_peak("NVIDIA H100", "bf16")
    assert isinstance(peak, Peak) and peak.flops is None
    assert utilisation(Flops(useful=1), 1.0, peak).mfu is None


def test_the_worked_example_in_the_docs() -> None:
    """docs/flops.md quotes these numbers; they are computed here from the same example."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "flops.md").read_text(encoding="utf-8")
    for value in worked_example().values():
        assert value in text, value


def worked_example() -> dict[str, Any]:
    """SmolLM2-135M, one pack of 2,048 slots: documents of 1,200 and 700 tokens, 148 slots of padding."""
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    shape = ModelShape.from_config(config)
    step = step_flops(shape, [1200, 700], SlotLayout.packed([1200, 700, 148]), recompute="full")
    full = document_flops(shape, [1200, 700], convention="full-attention")
    lora = document_flops(shape, [1200, 700], trainable=LoraShape(16, ("q_proj", "k_proj", "v_proj", "o_proj")))
    useful = step.useful
    return {
        "parameters": f"{shape.parameters:,}",
        "matmul parameters": f"{shape.matmul_parameters:,}",
        "head": f"{shape.head.parameters:,}",
        "matmul": f"{useful.matmul.total:,}",
        "attention": f"{useful.attention.total:,}",
        "head flops": f"{useful.head.total:,}",
        "useful": f"{useful.total:,}",
        "padding": f"{step.padding.total:,}",
        "recompute": f"{step.recompute.total:,}",
        "computed": f"{step.computed:,}",
        "full attention": f"{full.total:,}",
        "lora": f"{lora.total:,}",
    }
