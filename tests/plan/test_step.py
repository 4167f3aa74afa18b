"""The step model against things known without it: closed accounts, limits, volumes, bubbles, monotonicity."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.account import Account, NotClosed
from headway.account.flops import document_flops
from headway.plan.cluster import Cluster, load_cluster
from headway.plan.collectives import Network
from headway.plan.constants import Constants, default_constants, meanings
from headway.plan.fitting import BOUNDS
from headway.plan.kernels import Rates
from headway.plan.layout import Layout, problems
from headway.plan.memory import GIB
from headway.plan.pipeline import bubble
from headway.plan.predict import ACCOUNT_OF, predict
from headway.plan.profile import profile
from headway.plan.workload import Workload, load_model, model_presets

H100 = load_cluster("H100x64")


def work(model: str = "llama3-8b", seq: int = 4096, batch: int = 256, precision: str = "bf16") -> Workload:
    return Workload(load_model(model)[1], seq, batch, precision, model)


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    micro=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    zero=st.sampled_from([0, 1, 2, 3]),
    model=st.sampled_from(["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"]),
)
def test_every_prediction_is_a_closed_account(tp, pp, cp, micro, recompute, zero, model) -> None:
    layout = Layout(128 // (tp * pp * cp), tp, pp, cp, micro_batch=micro, recompute=recompute, zero=zero)
    found = predict(work(model), layout, H100.with_gpus(128))
    assert isinstance(found.account, Account)
    assert sum(found.account.parts.values()) == found.account.wall_ns
    assert abs(found.account.wall_ns / 1e9 - found.step_s) < 1e-6
    assert all(seconds >= 0 and math.isfinite(seconds) for seconds in found.terms.values())
    assert 0 < found.mfu < 1
    assert set(found.terms) <= set(ACCOUNT_OF)


def test_a_planted_negative_term_cannot_become_an_account() -> None:
    found = predict(work(), Layout(dp=64), H100)
    parts = dict(found.account.parts)
    parts["comm.dp"] = -1
    with pytest.raises(NotClosed):
        Account(found.account.tree, found.account.wall_ns, parts)


def ideal() -> tuple[Constants, Cluster]:
    """A machine without overheads: all work at the datasheet's peak."""
    perfect = replace(
        default_constants(), gemm_bf16=1.0, attention=1.0, head_dim=0.0, gemm_traffic=0.0, elementwise=0.0, kernel=0.0,
        launch=0.0, straggler=0.0, step=0.0, optimizer_bytes=0.0, hop=0.0, hop_inside=0.0, contention=0.0, attention_backward=2.0, hbm=1e9,
    )  # fmt: skip
    device = replace(H100.device, measured=dict(H100.device.rates), link=1e18, inter_node=1e18)
    return perfect, replace(H100, device=device, gpus=1, inter_node=1e18)


@pytest.mark.parametrize("model", ["llama3-8b", "llama2-70b", "nemotron4-15b", "gpt3-175b"])
def test_without_overheads_the_step_is_the_exact_flops_over_the_peak(model: str) -> None:
    constants, cluster = ideal()
    job = work(model, 2048, 2)
    found = predict(job, Layout(zero=0), cluster, constants)
    exact = document_flops(job.shape, [2048] * 2).total / cluster.device.rates["bf16"]
    assert found.step_s == pytest.approx(exact, rel=2e-3)


def test_full_recompute_costs_one_more_forward_and_selective_less() -> None:
    steps = {r: predict(work(), Layout(dp=64, recompute=r), H100) for r in ("none", "selective", "full")}
    assert steps["none"].terms["recompute"] == 0 < steps["selective"].terms["recompute"]
    assert steps["selective"].terms["recompute"] < steps["full"].terms["recompute"]
    head = predict(work(), Layout(dp=64), H100)
    assert steps["full"].terms["recompute"] < head.terms["forward"]
    half = predict(work(), Layout(dp=64, recompute="full", recompute_share=0.5), H100)
    assert half.terms["recompute"] == pytest.approx(steps["full"].terms["recompute"] / 2)
    assert steps["none"].memory.needed > half.memory.needed > steps["full"].memory.needed


def test_packed_documents_cost_what_their_squares_say() -> None:
    whole = predict(work(seq=8192), Layout(dp=64), H100)
    packed = predict(replace(work(seq=8192), mean_square=1024.0), Layout(dp=64), H100)
    one = predict(replace(work(seq=8192), mean_square=8192.0), Layout(dp=64), H100)
    assert packed.step_s < whole.step_s == one.step_s


@pytest.mark.parametrize("size", [1, 10**6, 10**9])
def test_collectives_move_the_textbook_volumes(size: int) -> None:
    net = Network.of(H100, replace(default_constants(), hop=0.0, hop_inside=0.0))
    group = net.group(8, 1)
    assert net.all_reduce(size, group) == pytest.approx(2 * 7 / 8 * size / net.link)
    assert net.gather(size, group) == pytest.approx(7 / 8 * size / net.link)
    assert net.all_to_all(size, group) == pytest.approx(7 / 8 * size / net.link)
    assert net.gather(size, net.group(1, 1)) == net.all_to_all(size, net.group(1, 1)) == 0


def test_switches_that_add_up_send_every_buffer_once() -> None:
    free = replace(default_constants(), hop=0.0, hop_inside=0.0)
    plain, summed = (Network.of(replace(H100, in_network=on), free) for on in (False, True))
    ranks = plain.group(8, 1)
    assert summed.all_reduce(1e9, ranks) == pytest.approx(plain.all_reduce(1e9, ranks) / (2 * 7 / 8))
    assert summed.gather(1e9, ranks) == plain.gather(1e9, ranks)
    layout = Layout(dp=8, tp=8, sequence_parallel=False)
    before, after = (predict(work(), layout, replace(H100, in_network=on)).terms for on in (False, True))
    assert after["tp"] < before["tp"] and after["forward"] == before["forward"]
    spread = replace(layout, sequence_parallel=True)
    assert (
        predict(work(), spread, H100).terms["tp"] == predict(work(), spread, replace(H100, in_network=True)).terms["tp"]
    )


def test_groups_know_where_the_fast_domain_ends() -> None:
    net = Network.of(load_cluster("H100x1024"), default_constants())
    assert not net.group(8, 1).crosses and net.group(16, 1).crosses and net.group(2, 8).crosses
    assert net.ring(net.group(16, 8)) < net.ring(net.group(16, 1)) <= net.link
    wide = Network.of(load_cluster("GB200x144"), default_constants())
    assert not wide.group(72, 1).crosses and wide.group(144, 1).crosses


def test_ring_volume_says_tp8_moves_117_hundredths_of_tp4() -> None:
    net = Network.of(H100, replace(default_constants(), hop=0.0, hop_inside=0.0))
    ratio = net.all_reduce(1e8, net.group(8, 1)) / net.all_reduce(1e8, net.group(4, 1))
    assert ratio == pytest.approx(7 / 8 / (3 / 4), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(stages=st.integers(2, 64), micro=st.integers(1, 512), chunks=st.integers(1, 8))
def test_bubble_is_narayanans_ratio_and_both_definitions_agree(stages, micro, chunks) -> None:
    found = bubble(Layout(pp=stages, vpp=chunks), micro, 1.0, 2.0)
    assert found.ratio == pytest.approx((stages - 1) / (chunks * micro))
    assert found.fraction == pytest.approx(found.seconds / (found.seconds + micro * 3.0))
    zero = bubble(Layout(pp=stages, schedule="zero-bubble"), micro, 1.0, 2.0)
    dual = bubble(Layout(pp=stages, schedule="dualpipe"), micro, 1.0, 2.0)
    assert zero.seconds < bubble(Layout(pp=stages), micro, 1.0, 2.0).seconds and dual.seconds >= 0


def test_memory_of_a_known_case() -> None:
    """Adam in bf16 with fp32 accumulation is 18 bytes a parameter unsharded (Rajbhandari et al. 2020, plus fp32 gradients)."""
    job = work("llama3-8b", 16, 1)
    held = predict(job, Layout(zero=0), replace(H100, gpus=1)).memory
    states = held.parameters + held.gradients + held.optimizer
    assert states == pytest.approx(18 * job.shape.parameters, rel=1e-3)
    sharded = predict(job, Layout(dp=64, zero=3), H100).memory
    assert sharded.gradients + sharded.optimizer == pytest.approx(16 * job.shape.parameters / 64, rel=1e-3)
    eight = predict(job, Layout(zero=0, optimizer_bits=8), replace(H100, gpus=1)).memory
    host = predict(job, Layout(zero=0, offload="host"), replace(H100, gpus=1))
    assert host.memory.optimizer == 0 < eight.optimizer < held.optimizer and host.terms["offload"] > 0


def test_the_same_speed_under_the_published_conventions() -> None:
    found = predict(work("gpt3-175b", 2048, 256), Layout(dp=8, tp=8, recompute="full"), H100)
    causal, full, hardware = (found.conventions[name] for name in ("causal", "full_attention", "hardware"))
    assert causal == found.mfu < full < hardware == pytest.approx(full * 4 / 3)
    shape, h, s = found.workload.shape, 12288, 2048
    megatron = 6 * shape.active_matmul_parameters + 12 * len(shape.layers) * h * s  # Narayanan et al. 2021, per token
    rate = megatron * found.tokens_per_s_per_gpu / H100.device.rates["bf16"]
    assert full == pytest.approx(rate, rel=0.02)


def test_a_prediction_module_costs_a_layer_and_a_head_more() -> None:
    job, layout = work("deepseek-v3", 4096, 64), Layout(dp=64, ep=64, zero=3, recompute="full")
    one, two = predict(job, layout, H100), predict(replace(job, mtp=1), layout, H100)
    assert two.facts["layers_on_slowest_stage"] == one.facts["layers_on_slowest_stage"] + 1
    assert two.terms["loss"] == pytest.approx(2 * one.terms["loss"]) and two.step_s > one.step_s
    assert two.memory.logits == pytest.approx(2 * one.memory.logits) and two.memory.optimizer > one.memory.optimizer
    assert load_model("deepseek-v3")[1].mtp_layers == 1


def test_memory_falls_with_sharding_and_grows_with_micro_batch() -> None:
    needed = [predict(work("llama3-70b"), Layout(dp=64, zero=zero), H100).memory.needed for zero in (0, 1, 2, 3)]
    assert needed == sorted(needed, reverse=True) and needed[0] > needed[3]
    sizes = [predict(work(), Layout(dp=64, micro_batch=size), H100).memory.activations for size in (1, 2, 4)]
    assert sizes[2] == pytest.approx(2 * sizes[1]) == pytest.approx(4 * sizes[0])
    assert H100.device.memory == 80 * GIB


def test_problems_name_the_key_and_the_nearest_values() -> None:
    shape = load_model("llama3-8b")[1]
    assert "tp=3 does not divide 32 heads; nearest: 1, 2, 4" in problems(Layout(tp=3), shape, H100, 4096, 64)
    assert any("ep=8" in one for one in problems(Layout(dp=64, ep=8), shape, H100, 4096, 64))
    assert not problems(Layout(dp=16, tp=4), shape, H100, 4096, 64)


def test_every_constant_has_a_meaning_and_the_fitted_ones_stay_physical() -> None:
    values = {item.name: item for item in meanings()}
    assert set(values) == set(vars(default_constants()))
    assert {item.name for item in meanings() if item.fitted} == set(BOUNDS)
    for name, (low, high) in BOUNDS.items():
        assert low <= values[name].value <= high, name
        assert values[name].unit and values[name].meaning
    assert len(BOUNDS) <= 32


def test_presets_load_and_profiles_hold_all_parameters() -> None:
    for name in model_presets():
        shape = load_model(name)[1]
        found = profile(shape)
        total = found.dense + found.expert + found.embedding + (0 if found.tied else found.head)
        assert total == shape.parameters, name


def test_fp8_is_faster_only_where_the_device_has_it() -> None:
    fast = predict(work(precision="fp8"), Layout(dp=64), H100).step_s
    assert fast < predict(work(), Layout(dp=64), H100).step_s
    old = load_cluster("A100x64")
    assert (
        predict(work(precision="fp8"), Layout(dp=64), old).step_s >= predict(work(), Layout(dp=64), old).step_s * 0.95
    )
    assert not Rates.of(old.device, "fp8", default_constants()).quantised


def test_the_pipeline_fills_through_stages_without_the_head() -> None:
    """A head that makes the last stage the slowest sets the pace of micro-batches, but not that of filling and draining."""
    _, shape = load_model("llama3-8b")
    cluster = load_cluster("H100x32")
    layout = Layout(dp=1, tp=1, pp=32, micro_batch=1)
    few, many = (predict(Workload(shape, 4096, m, "bf16"), layout, cluster) for m in (64, 128))
    assert few.facts["layers_on_slowest_stage"] == 1  # and the head, which is larger than the layer
    a_micro_batch = (many.step_s - few.step_s) / 64
    stage = few.terms["bubble"] / (layout.pp - 1)
    assert stage < 0.8 * a_micro_batch
    assert many.terms["bubble"] == pytest.approx(few.terms["bubble"])


def test_backwards_slices_travel_beside_products_that_do_not_wait_for_them() -> None:
    """Megatron since 2022: one of two all-reduces of backward, and one and a half of two and a half halves."""
    gpt, cluster = work("gpt3-175b", 2048, 64), load_cluster("A100x64")
    plain = replace(Layout(), dp=1, tp=8, pp=8, sequence_parallel=False, flash=False)
    for split in (False, True):
        before = predict(gpt, replace(plain, sequence_parallel=split), cluster).terms["tp"]
        after = predict(gpt, replace(plain, sequence_parallel=split, overlap_wgrad=True), cluster).terms["tp"]
        halves = 2.5 if split else 2.0
        assert after == pytest.approx(
            before * (halves - 1 + default_constants().contention) / halves, rel=1e-6
        )  # the window is long enough
    slow = replace(cluster, device=replace(cluster.device, link=cluster.device.link / 50))  # it is not any more
    before, after = (predict(gpt, replace(plain, overlap_wgrad=one), slow).terms["tp"] for one in (False, True))
    assert before * (1 + default_constants().contention) / 2 < after < before
    both = predict(gpt, replace(plain, overlap_wgrad=True, overlap_tp=True), cluster).terms["tp"]
    assert both == predict(gpt, replace(plain, overlap_tp=True), cluster).terms["tp"]
