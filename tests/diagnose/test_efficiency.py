"""MFU of a trace: FLOPs from shapes against PyTorch's own counter, and no figure where it would be a guess."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from diagnose.causes import each_step
from diagnose.kineto_maker import Kineto
from diagnose.real_traces import rank
from headway.account.errors import UserError
from headway.account.flops import SlotLayout, step_flops
from headway.account.shape import ModelShape
from headway.diagnose.efficiency import with_efficiency
from headway.diagnose.facts import Efficiency
from headway.diagnose.job import Options, read_job
from headway.diagnose.open import diagnose_traces, open_diagnosis
from headway.diagnose.said import Said
from headway.diagnose.shape_flops import operator_flops

OPERATORS = {
    "aten::mm": lambda: (torch.mm, [(6, 5), (5, 7)]),
    "aten::bmm": lambda: (torch.bmm, [(3, 6, 5), (3, 5, 7)]),
    "aten::addmm": lambda: (torch.addmm, [(7,), (6, 5), (5, 7)]),
    "aten::baddbmm": lambda: (torch.baddbmm, [(3, 6, 7), (3, 6, 5), (3, 5, 7)]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_flops_of_an_operator_agree_with_pytorchs_counter(name: str) -> None:
    function, sizes = OPERATORS[name]()
    with FlopCounterMode(display=False) as counter:
        function(*(torch.zeros(size) for size in sizes))
    assert operator_flops(name, json.dumps(sizes)) == counter.get_total_flops() > 0


def test_attention_over_its_own_keys_is_causal_and_backward_twice_forward() -> None:
    shape, longer = [2, 4, 8, 16], [2, 4, 9, 16]
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert operator_flops(name, json.dumps([shape, longer, longer])) == sdpa_flop_count(shape, longer, longer)
    forward = operator_flops("aten::_cudnn_attention_forward", json.dumps([shape] * 3))
    assert forward == 2 * 4 * 8 * 8 * 16 * 4 / 2
    backward = operator_flops("aten::_cudnn_attention_backward", json.dumps([shape] * 4))
    assert backward == 2 * forward
    rows_first = operator_flops("aten::_flash_attention_forward", json.dumps([[2, 8, 4, 16]] * 3))
    assert rows_first == forward


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::mm", "[[2, 3], [4, 5]]"),
        ("aten::mm", "[[2, 3]]"),
        ("aten::mm", "not json"),
        ("aten::mm", "[[], []]"),
        ("aten::add", "[[2, 3], [2, 3]]"),
        ("aten::_flash_attention_forward", "[[9, 4, 16], [9, 4, 16], [9, 4, 16], [3], [3]]"),
    ],
)
def test_shapes_that_do_not_tell_count_nothing(name: str, shapes: str) -> None:
    assert operator_flops(name, shapes) == 0


NOTHING = Said()


def products(shaped: int = 8, bare: int = 0, device: str = "NVIDIA H100 80GB HBM3") -> Kineto:
    """Products of 8192 × 2048 × 2048 that take 400 µs each; `bare` ones have no shapes."""

    def work(trace: Kineto, _: int) -> None:
        for _ in range(shaped):
            trace.matmul(400.0)
        for _ in range(bare):
            trace.kernel("nvjet_sm90_tst_128x256", 400.0, "aten::mm")
        trace.elementwise(40.0, shapes=[[8192, 2048]])

    return each_step(work, device=device)


def efficiency(path: Path, trace: Kineto, said: Said = NOTHING) -> Efficiency:
    job = with_efficiency(read_job([trace.write(path / "t.json.gz")]), said)
    found = job.ranks[0].device().efficiency
    assert found is not None
    return found


def test_mfu_is_flops_over_what_was_paid_for(tmp_path: Path) -> None:
    trace = products()
    found = efficiency(tmp_path, trace)
    device = read_job([tmp_path / "t.json.gz"]).ranks[0].device()
    flops = 4 * 8 * 2 * 8192 * 2048 * 2048
    assert found.flops is not None and found.flops.useful == flops
    assert found.mfu == pytest.approx(flops / (device.window.wall_ns / 1e9) / 989.4e12, rel=1e-3)
    assert found.coverage == pytest.approx(1.0)
    assert found.hfu is None, "without a backward in the trace recompute cannot be told"
    assert "2 FLOPs a multiply-add" in found.convention and "padding counts as useful" in found.convention


def test_too_few_shapes_give_no_mfu_and_say_how_many(tmp_path: Path) -> None:
    found = efficiency(tmp_path, products(shaped=7, bare=3))
    assert found.mfu is None and found.flops is None
    assert "shapes cover 70% of compute, 80% are needed" in found.why
    assert efficiency(tmp_path, products(shaped=9, bare=1)).mfu is not None


def test_an_unknown_device_has_no_mfu_until_it_is_named(tmp_path: Path) -> None:
    toaster = products(device="Toaster 3000")
    found = efficiency(tmp_path, toaster)
    assert found.mfu is None and "Toaster 3000" in found.why and found.flops is not None
    named = efficiency(tmp_path, toaster, Said(device="NVIDIA H100 80GB HBM3"))
    assert named.mfu is not None and "H100" in named.peak_text


def test_tokens_split_padding_off(tmp_path: Path) -> None:
    whole = efficiency(tmp_path, products())
    half = efficiency(tmp_path, products(), Said(tokens=100, slots=200))
    assert whole.mfu is not None and half.mfu == pytest.approx(whole.mfu / 2, rel=1e-6)
    assert half.padding == 0.5 and half.flops is not None and half.flops.padding == half.flops.useful


CONFIG = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_a_model_gives_flops_without_shapes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    said = Said(tokens=3000, slots=4000, model=tmp_path, sequence=500)
    found = efficiency(tmp_path, products(shaped=0, bare=8), said)
    exact = step_flops(ModelShape.from_config(CONFIG), [500] * 6, SlotLayout.packed([500] * 8)).to_flops()
    assert found.flops is not None
    assert (found.flops.useful, found.flops.padding) == (exact.useful, exact.padding)
    assert found.mfu is not None and "sequences of 500" in found.convention and found.coverage == 0


def test_a_model_without_tokens_or_slots_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = products().write(tmp_path / "t.json.gz")
    with pytest.raises(UserError, match="--tokens"):
        open_diagnosis([path], Options(), Said(model=tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json"):
        open_diagnosis([path], Options(), Said(model=tmp_path, tokens=5))


def test_so_many_tokens_that_no_number_of_devices_computes_them_are_named(tmp_path: Path) -> None:
    """Counted by arithmetic: a list of a billion documents would end the process before."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for tokens in (10**11, 10**12):
        with pytest.raises(UserError, match=rf"^--tokens {tokens:,}: too many .* window of"):
            efficiency(tmp_path, products(), Said(tokens=tokens, slots=tokens, model=tmp_path))
    assert efficiency(tmp_path, products(), Said(tokens=3_000, model=tmp_path)).mfu is not None


def test_a_model_split_over_ranks_has_no_mfu_and_keeps_its_diagnosis(tmp_path: Path) -> None:
    """`--model` is the whole model, and a tensor parallel rank's trace has an eighth of its work."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = products().write(tmp_path / "t.json.gz")
    one = efficiency(tmp_path, products(), Said(tokens=100_000, slots=100_000, model=tmp_path))
    assert one.mfu is not None
    many = int(3 * 100_000 / one.mfu)
    diagnosis = open_diagnosis([path], Options(), Said(tokens=many, slots=many, model=tmp_path))
    found = diagnosis.rank.device().efficiency  # type: ignore[union-attr]
    assert found is not None and found.mfu is None and found.flops is None
    assert "impossible" in found.why and "split over several devices" in found.why


def test_more_flops_than_the_device_can_do_are_an_error_and_no_result(tmp_path: Path) -> None:
    def work(trace: Kineto, _: int) -> None:
        trace.matmul(1.0)

    found = efficiency(tmp_path, each_step(work))
    assert found.mfu is None and "impossible" in found.why


def test_the_waterfall_is_in_flops_where_mfu_is_known(tmp_path: Path) -> None:
    path = products().write(tmp_path / "t.json.gz")
    diagnosis = diagnose_traces([path], Options(), None, Said())
    assert diagnosis.fall is not None and diagnosis.fall.peak_known
    assert diagnosis.fall.useful_share == pytest.approx(diagnosis.to_dict()["efficiency"]["mfu"], rel=1e-6)


def test_the_naive_loop_of_an_h200(shared: Path) -> None:
    """The document of this project: about 9 % MFU at 74 % utilisation (Qwen3-4B shape)."""
    config = dict(CONFIG, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                  num_key_value_heads=8, head_dim=128, vocab_size=151_936)  # fmt: skip
    device = rank(shared / "traces" / "h200" / "trace_naive_sdpa.json.gz").device()
    assert device.account.total("compute.recompute") == pytest.approx(
        0.8 * device.account.total("compute.forward"), rel=0.1
    )
    from headway.diagnose.efficiency import _of_model

    flops, _ = _of_model(ModelShape.from_config(config), 5350, 11_921, 400, device)
    assert flops.useful / (device.window.wall_ns / 1e9) / 989e12 == pytest.approx(0.085, abs=0.005)


def test_efficiency_is_plain_for_machines(tmp_path: Path) -> None:
    found = efficiency(tmp_path, products())
    assert json.dumps(dataclasses.asdict(dataclasses.replace(found, flops=None)))
