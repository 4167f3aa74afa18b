"""Hybrids: Mamba-2's scan and the gated delta rule are counted from config.json; Qwen3-Next's parameters are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.account.errors import UserError
from headway.plan.cluster import load_cluster
from headway.plan.constants import default_constants
from headway.plan.hybrid import _mamba_scan
from headway.plan.hybrid_delta import delta_shape
from headway.plan.kernels import Rates, layer_time
from headway.plan.layout import Layout
from headway.plan.predict import predict
from headway.plan.profile import profile
from headway.plan.workload import Workload, load_model, model_presets, shape_of

C = default_constants()


def test_a_chunks_products_are_those_of_the_algorithm_written_out() -> None:
    """State-space duality over one chunk, counted product by product as loops would run it."""
    heads, dim, groups, state, chunk = 6, 4, 2, 8, 16
    flops = 0
    for _ in range(groups):
        flops += 2 * chunk * chunk * state  # C B^T
    for _ in range(heads):
        flops += 2 * chunk * chunk * dim  # scores x
        flops += 2 * chunk * dim * state  # B^T x: the chunk's state
        flops += 2 * chunk * dim * state  # C state: what came before
    scan = _mamba_scan(heads, dim, groups, state, chunk)
    assert scan.flops * chunk == flops
    assert scan.states * chunk == heads * dim * state


def test_the_scan_takes_time_that_grows_with_its_state_and_shrinks_with_tp() -> None:
    config = model_presets()["nemotron-3-nano"]

    def seconds(tp: int = 1, **change: int) -> float:
        model = profile(shape_of({**config, **change}))
        kind = next(kind for kind in model.kinds if kind.scan)
        rates = Rates.of(load_cluster("H100x8").device, "bf16", C)
        return layer_time(kind, model.hidden, 8192, 8192, Layout(tp=tp), rates, C, False).core

    assert seconds() > 0
    assert seconds(ssm_state_size=256) > 1.5 * seconds()
    assert seconds(chunk_size=64) > seconds(chunk_size=256)  # twice the states between chunks outweigh the scores
    assert seconds(tp=2) == pytest.approx(seconds() / 2)


def test_a_plan_without_the_scan_is_faster_and_one_block_layers_count_as_one() -> None:
    name, shape = load_model("nemotron-3-nano")
    cluster = load_cluster("H100x8")
    work = Workload(shape, 8192, 64, "bf16", name)
    layout = Layout(dp=8, ep=8, recompute="full")
    whole = predict(work, layout, cluster, C).step_s
    bare = replace(shape, layers=tuple(replace(layer, scan=None) for layer in shape.layers))
    assert predict(replace(work, shape=bare), layout, cluster, C).step_s < 0.97 * whole
    assert {kind.blocks for kind in profile(shape).kinds} == {1}
    for preset in ("llama3-8b", "mixtral-8x7b", "qwen3-next-80b-a3b", "deepseek-v3"):
        assert {kind.blocks for kind in profile(load_model(preset)[1]).kinds} == {2}


def test_qwen3_next_is_transformers_to_the_parameter() -> None:
    _, shape = load_model("qwen3-next-80b-a3b")
    assert (
        shape.parameters == 79_674_391_296
    )  # transformers 5.24, Qwen3NextForCausalLM of its default config, meta device
    assert [layer.scan is None for layer in shape.layers[:8]] == [False, False, False, True] * 2
    config = dict(model_presets()["qwen3-next-80b-a3b"])
    small = {**config, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "mlp_only_layers": [0]}
    assert shape_of(small).layers[0].mlp.experts == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_experts_per_tok": 0}, "'num_experts_per_tok' is 0"),
        ({"layer_types": ["mamba"] * 48}, "layer_types holds 'mamba'; nearest: linear_attention, full_attention"),
        ({"linear_key_head_dim": "x"}, "'linear_key_head_dim' is 'x'"),
    ],
)
def test_bad_keys_are_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        delta_shape({**model_presets()["qwen3-next-80b-a3b"], **change})


def test_experts_across_nodes_cost_the_network_and_one_copy_a_node_costs_less() -> None:
    name, shape = load_model("qwen3-235b-a22b")
    work = Workload(shape, 4096, 1024, "bf16", name)
    cluster = load_cluster("H100x256")

    def ep(**change: object) -> float:
        return predict(work, Layout(dp=32, pp=8, recompute="full", **change), cluster, C).terms["ep"]  # type: ignore[arg-type]

    assert ep(ep=32) > 5 * ep(ep=8)
    assert ep(ep=32, dedup=True) < 0.6 * ep(ep=32)
    two = Layout(dp=16, tp=2, pp=8, ep=8, recompute="full")
    assert two.expert_tp == 2 and replace(two, etp=1).expert_tp == 1
    whole, split = (predict(work, one, cluster, C).terms["ep"] for one in (replace(two, etp=1), two))
    assert split > whole  # ranks that share an expert gather each other's tokens
