"""Our Triton attention on a card: with the tiles that it is used with. Each case compiles three kernels (seconds)."""

from __future__ import annotations

import pytest
import torch

from headway.model import triton_attention
from headway.model.attention import choose_path, headway_attention
from headway.model.documents_attention import attend_documents
from headway.model.kernels.attention import use_attention
from headway.model.triton_attention import attend_triton, kernels_missing
from headway.model.varlen_attention import attend_varlen
from model.naive_attention import random_qkv, with_gradients, worst

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or kernels_missing("cuda", 0) is not None, reason="needs a GPU and Triton"
)
BOUND = 2e-2
MIXED = [300, 1, 17, 513, 64, 5, 1]  # 901 slots; a border in nearly every tile


def table(lengths, repeats=3):
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    return torch.cat([cu, cu[-1:].expand(repeats)])


CASES = {
    "heads of 128, groups of four, as in Qwen3": (8, 2, 128, {}),
    "heads of 64, window": (8, 2, 64, {"window": 70}),
    "heads of 80, no groups, scale": (3, 3, 80, {"scale": 0.2}),
    "heads of 256, soft cap, a group of six": (6, 1, 256, {"softcap": 5.0, "window": 200}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_document_at_a_time_in_float64(case):
    heads, kv_heads, head_dim, options = CASES[case]
    for lengths in (MIXED, [1], [130], [2] * 70):
        qkv = tuple(x.bfloat16() for x in random_qkv(heads, kv_heads, sum(lengths), head_dim))
        wide = tuple(x.double() for x in qkv)
        expected = with_gradients(lambda q, k, v: attend_documents(q, k, v, lengths, **options), wide)  # noqa: B023
        narrow = tuple(x.cuda().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
        cu = table(lengths)
        one, two = (with_gradients(lambda q, k, v: attend_triton(q, k, v, cu, **options), narrow) for _ in range(2))  # noqa: B023
        assert worst(one, expected) < BOUND, lengths
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), "the same bits every time"


def test_a_long_pack_equals_varlen():
    """Loops of many blocks, without masks and with; real sizes."""
    lengths = [5000, 3, 690, 8192, 1213, 700, 586]
    qkv = tuple(x.cuda().bfloat16() for x in random_qkv(8, 2, sum(lengths), 128))
    cu = table(lengths)
    expected = with_gradients(lambda q, k, v: attend_varlen(q, k, v, cu, 8192), qkv)
    assert worst(with_gradients(lambda q, k, v: attend_triton(q, k, v, cu), qkv), expected) < BOUND
    merged = table([5003, 690, 8192, 1213, 700, 586])
    assert worst(with_gradients(lambda q, k, v: attend_triton(q, k, v, merged), qkv), expected) > BOUND, "planted"


def test_a_compiled_layer_is_one_graph_and_the_same():
    module = torch.nn.Module()
    module.is_causal = True
    use_attention([module], "triton")
    project = torch.nn.Linear(256, 12 * 64, bias=False, device="cuda", dtype=torch.bfloat16)

    def layer(x, cu):
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in project(x).split((512, 128, 128), -1))
        return headway_attention(module, q, k, v, None, cu_seq_lens_q=cu, max_length_q=901)[0]

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(1, 901, 256, device="cuda", dtype=torch.bfloat16)
    for lengths in (MIXED, [901]):
        found = [with_gradients(lambda x: f(x, table(lengths)), (x,)) for f in (compiled, layer)]  # noqa: B023
        assert worst(*found) < BOUND


def test_offsets_past_two_to_the_31():
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    slots, tail = 140_000, 1_000
    q = torch.randn(1, slots, 128, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)  # 2.3e9 elements
    k, v = (torch.randn(1, slots, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    cu = torch.tensor([*range(0, slots, tail), slots], device="cuda", dtype=torch.int32)
    ends = tuple(x[:, :, -tail:].clone() for x in (q, k, v))
    expected = with_gradients(lambda q, k, v: attend_documents(q, k, v, [tail]), ends)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend_triton(*leaves, cu)
    cotangent = torch.zeros_like(out)
    generator = torch.Generator().manual_seed(1)
    cotangent[:, :, -tail:] = torch.randn(expected[0].shape, dtype=torch.float64, generator=generator).to(out)
    found = [out, *torch.autograd.grad(out, leaves, cotangent)]
    assert worst([x[:, :, -tail:].detach().double().cpu() for x in found], expected) < BOUND
    assert all(float(x[:, :, :-tail].abs().max()) == 0 for x in found[1:]), "no gradient of another document"


def test_the_choice_has_it_and_it_is_right():
    assert triton_attention.tiles_of(torch.empty(1, 2, 128, device="cuda", dtype=torch.bfloat16)) is not None
    q = torch.empty(1, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    assert choose_path(q, q, q, chosen="triton") == ("triton", "measured fastest")
    assert choose_path(q.float(), q.float(), q.float(), chosen="triton")[0] == "flex"
