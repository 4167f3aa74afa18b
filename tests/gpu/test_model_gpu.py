"""Attention and models on a CUDA device, against float64 on the CPU. Skipped without one; seconds with one."""

from __future__ import annotations

import copy

import pytest
import torch

from headway.model import attention
from headway.model.attention import choose_path
from headway.model.documents_attention import attend_documents
from headway.model.flex_attention import attend_flex
from headway.model.forward import forward_logits
from headway.model.isolation import prove_isolation
from headway.model.loss import loss_sum
from headway.model.recompute import set_recompute
from headway.model.varlen_attention import attend_varlen, varlen_cannot
from model.naive_attention import random_qkv, with_gradients, worst
from model.tiny_models import batch_of, documents, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest ||error|| / ||reference|| of output and gradients."""

PACKS = {
    "mixed": [300, 1, 17, 513, 64, 5],  # 900 slots: not a multiple of a block
    "one": [257],
    "tiny": [1] * 40 + [3] * 29,
}


@pytest.fixture(autouse=True)
def _full_float32_and_fresh_compiler():
    """TF32 would hide errors of the size looked for here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()  # every test brings other shapes; together they would pass the limit on recompilations
    yield
    torch.set_float32_matmul_precision(before)


def reference(qkv, lengths, **options):
    """Per-document attention in float64 on the CPU (itself proved against a naive loop in tests/model)."""
    return with_gradients(lambda q, k, v: attend_documents(q, k, v, lengths, **options), qkv)


def on_gpu(attend, qkv, lengths, dtype, repeats=3, **options):
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    cu = torch.cat([cu, cu[-1:].expand(repeats)])  # a bucketed table ends in empty documents
    options = {name: x.cuda().float() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    tensors = tuple(x.to("cuda", dtype) for x in qkv)
    return with_gradients(lambda q, k, v: attend(q, k, v, cu, **options), tensors)


def rounded(qkv, dtype):
    """The reference starts from the same rounded inputs: only the computation is judged."""
    return tuple(x.to(dtype).double() for x in qkv)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (3, 1, 64), (4, 4, 80), (2, 1, 256)])
def test_varlen(pack, window, heads, kv_heads, head_dim):
    lengths = PACKS[pack]
    qkv = rounded(random_qkv(heads, kv_heads, sum(lengths), head_dim), torch.bfloat16)
    half = qkv[0].bfloat16()
    if reason := varlen_cannot(half, half, half, scale=0.1, window=window):
        pytest.skip(reason)

    def attend(q, k, v, cu, **options):
        return attend_varlen(q, k, v, cu, max(lengths), **options)

    options = {"scale": 0.1, "window": window}
    result = on_gpu(attend, qkv, lengths, torch.bfloat16, **options)
    assert worst(result, reference(qkv, lengths, **options)) < BOUND[torch.bfloat16]


def test_varlen_accepts_a_larger_maximum_and_is_not_fooled_by_merged_documents():
    lengths = PACKS["mixed"]
    qkv = rounded(random_qkv(4, 2, sum(lengths), 64), torch.bfloat16)
    expected = reference(qkv, lengths)
    result = on_gpu(lambda q, k, v, cu: attend_varlen(q, k, v, cu, 2048), qkv, lengths, torch.bfloat16)
    assert worst(result, expected) < BOUND[torch.bfloat16]
    merged = [lengths[0] + lengths[1] + lengths[2], *lengths[3:]]
    planted = on_gpu(lambda q, k, v, cu: attend_varlen(q, k, v, cu, 2048), qkv, merged, torch.bfloat16)
    assert worst(planted, expected) > 10 * BOUND[torch.bfloat16]


FLEX = {
    "window and scale": (4, 2, 64, torch.bfloat16, {"window": 33, "scale": 0.2}),
    "softcap": (4, 2, 64, torch.bfloat16, {"softcap": 5.0}),
    "sinks": (4, 2, 64, torch.bfloat16, {"sinks": True, "window": 40}),
    "float32, odd head size, heads not a power of two": (6, 2, 80, torch.float32, {}),
}
"""Few: each is compiled, forward and backward."""


@pytest.mark.parametrize("case", FLEX)
def test_flex(case):
    heads, kv_heads, head_dim, dtype, options = FLEX[case]
    lengths = PACKS["mixed"]
    if options.get("sinks"):
        options = options | {"sinks": torch.linspace(-1, 1, heads, dtype=torch.float64)}
    qkv = rounded(random_qkv(heads, kv_heads, sum(lengths), head_dim), dtype)
    result = on_gpu(attend_flex, qkv, lengths, dtype, **options)
    # Its float32 products may run on tensor cores in TF32 whatever the precision asked for.
    bound = 2e-3 if dtype == torch.float32 else BOUND[dtype]
    assert worst(result, reference(qkv, lengths, **options)) < bound


def test_documents_path_serves_what_neither_kernel_does():
    lengths = PACKS["mixed"]
    qkv = random_qkv(4, 2, sum(lengths), 64)
    result = on_gpu(
        lambda q, k, v, cu, **o: attend_documents(q, k, v, cu.diff().tolist(), **o),
        qkv,
        lengths,
        torch.float32,
        window=33,
    )
    assert worst(result, reference(qkv, lengths, window=33)) < BOUND[torch.float32]


EVERY_EXPERT = {"num_experts_per_tok": 2}  # no token changes its expert by a rounding

MODELS = {
    "llama": ("varlen", {"head_dim": 64}),
    "qwen3_moe": ("varlen", {"head_dim": 64, "num_experts": 2, **EVERY_EXPERT}),
    "mistral": ("varlen", {"head_dim": 64}),
    "gemma2": ("flex", {"head_dim": 64}),
    "gpt_oss": ("flex", {"head_dim": 64, "num_local_experts": 2, **EVERY_EXPERT}),
}


@pytest.mark.parametrize("family", MODELS)
def test_models_packed_on_the_gpu_equal_the_cpu_in_float32(family):
    path, changes = MODELS[family]
    exact = tiny(family, initializer_range=0.1, **changes)
    batch = batch_of([documents([61, 1, 130, 9])], 257)

    def step(model, batch):
        logits = forward_logits(model, batch)
        loss_sum(logits, batch.labels, z_loss=1e-4).loss.backward()
        return logits.detach().float().cpu(), {n: p.grad.float().cpu() for n, p in model.named_parameters()}

    gpu = copy.deepcopy(exact).bfloat16().cuda()
    rounded_cpu = copy.deepcopy(gpu).float().cpu()
    q = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16, device="cuda")
    softcap = 3.0 if family == "gemma2" else None
    sinks = torch.zeros(4) if family == "gpt_oss" else None
    assert choose_path(q, q, q, softcap=softcap, sinks=sinks)[0] == path
    logits, gradients = step(gpu, batch.to("cuda"))
    expected, expected_gradients = step(rounded_cpu, batch)
    real = slice(0, 201)
    assert float((logits[0, real] - expected[0, real]).norm() / expected[0, real].norm()) < 5e-2
    assert expected_gradients.keys() == gradients.keys()
    squares = sum((gradients[n] - g).square().sum() for n, g in expected_gradients.items())
    size = sum(g.square().sum() for g in expected_gradients.values())
    assert float((squares / size).sqrt()) < 1e-1


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral", "gemma2"])
def test_isolation_is_proved_on_the_gpu(family):
    model = tiny(family, dtype="bfloat16", **MODELS[family][1]).cuda()
    report = prove_isolation(model, device="cuda")
    assert report.conclusive, report
    assert max(report.leak, report.lookahead) <= report.tolerance


def test_autocast_over_float32_weights_still_runs_the_fast_kernel(monkeypatch):
    calls = []
    original = attention.attend_varlen

    def counting(query, *rest, **options):
        calls.append(query.dtype)
        return original(query, *rest, **options)

    monkeypatch.setattr(attention, "attend_varlen", counting)
    model = tiny("llama", head_dim=64).cuda()
    batch = batch_of([documents([61, 1, 130, 9])], 257).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert prove_isolation(model, device="cuda").conclusive
        calls.clear()
        logits = forward_logits(model, batch)
    loss_sum(logits, batch.labels).loss.backward()
    assert calls == [torch.bfloat16] * 2
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_recompute_and_compiled_layers_see_the_documents():
    model = tiny("qwen3", dtype="bfloat16", head_dim=64).cuda()
    batch = batch_of([documents([61, 1, 130, 9])], 257).to("cuda")

    def gradients():
        model.zero_grad()
        loss_sum(forward_logits(model, batch), batch.labels).loss.backward()
        return [p.grad.float() for p in model.parameters()]

    plain = gradients()
    set_recompute(model, "full")
    assert worst(gradients(), plain) < 1e-2
    for layer in model.model.layers:
        layer.compile()
    assert worst(gradients(), plain) < 5e-2


def test_loss_on_the_gpu_equals_float64():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(700, 5003, generator=generator) * 3).bfloat16()
    labels = torch.randint(0, 5003, (700,), generator=generator)
    labels[::3] = -100
    results = []
    for tensor in (logits.double(), logits.cuda()):
        leaf = tensor.requires_grad_()
        result = loss_sum(leaf, labels.to(leaf.device), z_loss=1e-4, label_smoothing=0.1)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        results.append([result.loss.detach().double().cpu(), gradient.double().cpu()])
    assert worst(results[1], results[0]) < 4e-3
