"""Our Triton attention in Triton's interpreter, against one document at a time in float64; planted faults; compiled for
compute capability 9.0. On a card tests/gpu/test_triton_attention_gpu.py takes its place. `make test-kernels`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from model.interpreted import ask_for_the_interpreter

if torch.cuda.is_available():
    pytest.skip("on a card the tests in tests/gpu run", allow_module_level=True)
else:
    ask_for_the_interpreter()
pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` runs this in its interpreter")

from headway.model import recompute, triton_attention
from headway.model import triton_attention_source as source
from headway.model.attention import headway_attention
from headway.model.documents_attention import attend_documents
from headway.model.kernels.attention import use_attention
from headway.model.triton_attention import Tile, Tiles, attend_triton, packed_attention
from model.naive_attention import random_qkv, with_gradients, worst
from model.triton_interpreter import mend

mend()
BOUND = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    tiles(monkeypatch, 16, 32)
    monkeypatch.setattr(triton_attention, "padded", lambda size: max(16, 1 << (size - 1).bit_length()))


def tiles(monkeypatch, rows, keys):
    tile = Tile(rows, keys, 4, 1)
    monkeypatch.setattr(triton_attention, "tiles_of", lambda query: Tiles(tile, tile, tile))


def table(lengths, repeats=3):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.cat([cu, cu[-1:].expand(repeats)])  # a bucketed table ends in empty documents


def errors(lengths, heads, kv_heads, head_dim, dtype=torch.float32, cu=None, laid=lambda x: x, **options):
    """||error|| / ||reference|| of output and gradients, the worst of them."""
    qkv = tuple(x.to(dtype).double() for x in random_qkv(heads, kv_heads, sum(lengths), head_dim))
    expected = with_gradients(lambda q, k, v: attend_documents(q, k, v, lengths, **options), qkv)
    cu = table(lengths) if cu is None else cu
    found = with_gradients(
        lambda q, k, v: attend_triton(laid(q), laid(k), laid(v), cu, **options), tuple(x.to(dtype) for x in qkv)
    )
    return worst(found, expected)


MIXED = [20, 1, 9, 3, 18]  # 51 slots: no multiple of a tile; borders inside tiles
CASES = {
    "one token": ([1], 1, 1, 16, {}),
    "grouped": (MIXED, 4, 2, 16, {}),
    "a group of seven": ([11, 30], 7, 1, 16, {}),
    "a group of six, head size no power of two": (MIXED, 6, 1, 24, {}),
    "one document": ([70], 2, 1, 16, {}),
    "many tiny ones, all heads on one key head": ([1, 2] * 15, 8, 1, 16, {}),
    "window": ([61, 9], 4, 2, 16, {"window": 19}),
    "window of one": ([9, 8], 2, 1, 16, {"window": 1}),
    "window wider than all": (MIXED, 2, 2, 16, {"window": 500}),
    "soft cap and scale": (MIXED, 4, 2, 16, {"softcap": 3.0, "scale": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_document_at_a_time_in_float64(case):
    lengths, heads, kv_heads, head_dim, options = CASES[case]
    assert errors(lengths, heads, kv_heads, head_dim, **options) < BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype):
    assert errors(MIXED, 4, 2, 16, dtype) < BOUND[dtype]


@pytest.mark.parametrize("shape", [(16, 16), (32, 16), (64, 32)])
def test_any_tile(monkeypatch, shape):
    tiles(monkeypatch, *shape)
    assert errors([40, 1, 26], 4, 1, 16) < BOUND[torch.float32]


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(lambda lengths: 0 < sum(lengths) <= 70),
    st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2)]),
    st.sampled_from([None, 1, 5, 33]),
)
def test_any_pack(lengths, heads, window):
    """Empty documents anywhere."""
    assert errors(lengths, *heads, 16, window=window) < BOUND[torch.float32]


def test_memory_laid_out_in_any_way():
    apart = {
        "heads before slots": lambda x: x.contiguous(),
        "slots before heads, as projections leave them": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "part of wider rows": lambda x: (
            torch.cat([x, x], 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]]
        ),
        "rows that are not dense": lambda x: torch.stack([x, x], -1)[..., 0],
    }
    for name, laid in apart.items():
        assert errors([13, 5], 2, 1, 16, laid=laid) < BOUND[torch.float32], name


def test_the_gradient_of_a_sum_has_no_memory_of_its_own():
    q, k, v = (x.float().requires_grad_() for x in random_qkv(2, 1, 9, 16))
    found = torch.autograd.grad(attend_triton(q, k, v, table([4, 5])).sum(), (q, k, v))
    wide = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    expected = torch.autograd.grad(attend_documents(*wide, [4, 5]).sum(), wide)
    assert worst([x.double() for x in found], list(expected)) < BOUND[torch.float32]


def test_slots_past_the_table_are_one_more_document():
    assert errors([7, 12], 2, 1, 16, cu=torch.tensor([0, 7], dtype=torch.int32)) < BOUND[torch.float32]


def test_no_slot_at_all_and_the_same_bits_twice():
    assert attend_triton(*(torch.zeros(1, 2, 0, 16),) * 3, table([0])).shape == (1, 2, 0, 16)
    qkv = tuple(x.bfloat16() for x in random_qkv(4, 1, 30, 16))
    one, two = (with_gradients(lambda q, k, v: attend_triton(q, k, v, table([21, 9])), qkv) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_compiled_layer_is_not_broken_apart():
    q, k, v = (x.float().transpose(1, 2).contiguous().requires_grad_() for x in random_qkv(2, 1, 12, 16))

    def layer(q, k, v, cu):
        out = attend_triton(*(x.transpose(1, 2) * 2 for x in (q, k, v)), cu, window=7)
        return out.transpose(1, 2).contiguous().sin()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ([7, 5], [1, 11]):  # the same graph for another pack
        one, two = (torch.autograd.grad(f(q, k, v, table(lengths)).sum(), (q, k, v)) for f in (layer, compiled))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    call = (*(x[0].detach().requires_grad_() for x in (q, k, v)), table([7, 5]), 0.25, 0, 0.0)
    torch.library.opcheck(
        packed_attention, call, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


class _Attention(torch.nn.Module):
    is_causal = True


def test_a_compiled_model_asks_no_device_while_it_is_traced(monkeypatch):
    """The choice by measurement, transformers' interface and our kernels in one graph."""
    monkeypatch.setattr(triton_attention, "kernels_missing", lambda kind, index: None)
    module = _Attention()
    use_attention([module], "triton")
    q, k, v = (x.bfloat16() for x in random_qkv(4, 2, 12, 16))

    def layer(q, k, v, cu):
        return headway_attention(module, q, k, v, None, cu_seq_lens_q=cu, max_length_q=12)[0] * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, table([7, 5])), layer(q, k, v, table([7, 5])))
    assert (
        worst(
            [layer(q, k, v, table([7, 5])).double() / 2],
            [attend_documents(q.double(), k.double(), v.double(), [7, 5]).transpose(1, 2)],
        )
        < BOUND[torch.bfloat16]
    )


def test_selective_recompute_keeps_its_output(monkeypatch):
    launched = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(1)
            return self.kernel[grid]

    monkeypatch.setattr(source, "attention_forward", Counted(source.attention_forward))
    q, k, v = (x.float().requires_grad_() for x in random_qkv(2, 1, 9, 16))
    cu = table([4, 5])

    def layer(q):
        return attend_triton(q.sin(), k, v, cu).sin()

    plain = torch.autograd.grad(layer(q).sum(), (q, k, v))
    contexts = partial(recompute._contexts, frozenset(recompute._attention()))
    found = torch.autograd.grad(checkpoint(layer, q, use_reentrant=False, context_fn=contexts).sum(), (q, k, v))
    assert len(launched) == 2 and all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


FAULTS = ["documents run into each other", "a start is one too early", "the diagonal is lost", "a head of the group"]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(monkeypatch, fault):
    cu = table(MIXED)
    if fault == "documents run into each other":
        cu = table([21, 9, 3, 18])
    if fault == "a start is one too early":
        cu = torch.where(cu == 30, 29, cu)
    if fault == "the diagonal is lost":
        monkeypatch.setattr(source, "_key_blocks", _without_the_diagonal)
    if fault == "a head of the group":
        monkeypatch.setattr(source, "attention_backward_keys", _Halved(source.attention_backward_keys))
    assert not errors(MIXED, 6, 1, 16, cu=cu) < 1e-2


_key_blocks = source._key_blocks


def _without_the_diagonal(bounds, first, last, BLOCK, WINDOW):
    low, a, b = _key_blocks(bounds, first - 1, last, BLOCK, WINDOW)
    return low, a, b + BLOCK


class _Halved:
    """The keys' launch with one pack of heads left out."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*tensors, **options):
            self.kernel[grid](*tensors, **options | {"REST": options["REST"] - 1, "HEADS": options["HEADS"] - 2})

        return launch


COMPILE = """
import os, subprocess, sys
import torch, triton
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headway.model import triton_attention as host, triton_attention_source as source

PTXAS = os.path.join(os.path.dirname(nvidia.__file__), "bin", "ptxas")
FLOATS = ("lse", "delta", "scale", "cap")

def build(kernel, tile, head_dim):
    q, k = torch.empty(16, 32, head_dim, device="meta"), torch.empty(16, 8, head_dim, device="meta")
    every = host._constants(tile, 0, 0.0, q, k, k, q) | host._stages(tile)
    names = kernel.arg_names
    constants = {name: every[name] for name in names if name in every}
    kinds = {"lse": "*fp32", "delta": "*fp32", "bounds": "*i32", "scale": "fp32", "cap": "fp32", "slots": "i32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
    with open(sys.argv[1], "w") as file:
        file.write(made.asm["ptx"])
    report = subprocess.run([PTXAS, "-v", "--gpu-name=sm_90a", sys.argv[1], "-o", os.devnull], capture_output=True, text=True)
    line = next(line for line in report.stderr.splitlines() if "spill stores" in line)
    print(kernel.fn.__name__, head_dim, tile, line.strip(), made.metadata.shared, flush=True)
    assert "wgmma.mma_async" in made.asm["ptx"] and made.metadata.shared <= 227 * 1024
    spilled = int(line.split(" bytes spill stores")[0].split()[-1])
    assert spilled <= ALLOWED.get((kernel.fn.__name__, head_dim), 0), line

table = {"table": "*i32", "bounds": "*i32", "entries": "i32", "slots": "i32", "STEPS": "constexpr", "BLOCK": "constexpr"}
triton.compile(ASTSource(source.document_bounds, table, {"STEPS": 8, "BLOCK": 256}), GPUTarget("cuda", 90, 32))
ALLOWED = {("attention_backward_keys", 128): 40}  # two registers are read back in a turn of the loop without masks
for head_dim in (64, 128):
    tiles = host._HOPPER[host.padded(head_dim)]
    build(source.attention_forward, tiles.forward, head_dim)
    build(source.attention_backward_queries, tiles.queries, head_dim)
    build(source.attention_backward_keys, tiles.keys, head_dim)
"""


@pytest.mark.timeout(900)
def test_compiles_for_hopper_without_one(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    path = tmp_path / "build.py"
    path.write_text(COMPILE)
    command = [sys.executable, str(path), str(tmp_path / "kernel.ptx")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
