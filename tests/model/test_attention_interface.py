"""What `headway` refuses, which path it takes, and the CUDA paths as far as a CPU can tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from headway.account.errors import UserError
from headway.model import attention, flash_attention, recompute, triton_attention, varlen_attention
from headway.model.attention import NAME, choose_path, headway_attention, register
from headway.model.documents_attention import attend_documents
from headway.model.flash_attention import attend_flash
from headway.model.flex_attention import attend_flex
from headway.model.forward import forward_logits
from headway.model.load import load_model
from headway.model.varlen_attention import attend_varlen, varlen_cannot
from model.naive_attention import naive_attention, random_qkv, worst
from model.tiny_models import batch_of, documents
from tiny import config

LAYERS = ["sliding_attention", "full_attention"]


class Attention(nn.Module):
    is_causal = True


def call(module=None, slots=12, rows=1, keys=None, **changes):
    q, k, v = (x.float() for x in random_qkv(4, 2, slots, 8))
    q, k, v = q.expand(rows, -1, -1, -1), k[:, :, :keys], v[:, :, :keys]
    table = {"cu_seq_lens_q": torch.tensor([0, 5, slots], dtype=torch.int32), "max_length_q": slots}
    return headway_attention(module or Attention(), q, k, v, **{"attention_mask": None} | table | changes)


def test_registered_once():
    register()
    register()
    assert AttentionInterface()[NAME] is headway_attention


class _Waits(TorchDispatchMode):
    """Calls of a forward pass that bring a tensor's value to the host."""

    def __init__(self):
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mask_is_made_and_the_host_waits_for_nothing():
    """transformers looks for documents in the positions of every pass (`.all()` on the host) for a registered mask."""
    model = load_model(config=config(model_type="qwen2", use_sliding_window=True, layer_types=LAYERS), attention=NAME)
    batch = batch_of([documents([7, 5, 4])], 20)
    with _Waits() as waits:
        logits = forward_logits(model, batch)
    assert waits.found == []
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # the fault
    try:
        with _Waits() as planted:
            assert torch.equal(forward_logits(model, batch), logits)
    finally:
        AttentionMaskInterface._global_mapping.pop(NAME)
    assert planted.found


def test_output_is_slots_before_heads():
    q, k, v = random_qkv(4, 2, 12, 8)
    out, weights = call(unknown_keyword=1, position_ids=None)
    assert weights is None and out.shape == (1, 12, 4, 8) and out.is_contiguous()
    assert worst([out.double()], [naive_attention(q, k, v, [5, 7]).transpose(1, 2)]) < 1e-5


def test_queries_widened_by_rotary_tables_are_brought_back_to_the_type_of_the_values(monkeypatch):
    seen = []
    original = attention._attend_documents

    def watching(query, key, value, *rest, **options):
        seen.append({query.dtype, key.dtype, value.dtype})
        return original(query, key, value, *rest, **options)

    monkeypatch.setattr(attention, "_attend_documents", watching)
    q, k, v = (x.float() for x in random_qkv(4, 2, 12, 8))
    table = {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32), "max_length_q": 7}
    headway_attention(Attention(), q, k, v.bfloat16(), None, **table)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = headway_attention(Attention(), q, k, v, None, **table)
    assert seen == [{torch.bfloat16}] * 2 and out.dtype == torch.bfloat16


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_autocast_does_not_reach_into_the_chosen_type(softcap):
    q, k, v = (x.float() for x in random_qkv(4, 2, 12, 8))
    plain = attend_documents(q, k, v, [5, 7], softcap=softcap)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend_documents(q, k, v, [5, 7], softcap=softcap), plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_q": None}, "got no document table"),
        ({"max_length_q": None}, "got no document table"),
        ({"rows": 2}, "not a batch of 2 rows"),
        ({"keys": 7}, "a key cache is in use"),
        ({"attention_mask": torch.ones(1, 1, 12, 12)}, "brings its own attention mask"),
        ({"is_causal": False}, "both directions"),
        ({"position_bias": torch.zeros(1)}, "needs position_bias"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message) as error:
        call(**changes)
    assert "Attention" in str(error.value)


def test_a_module_that_attends_both_ways_is_refused():
    module = Attention()
    module.is_causal = False
    with pytest.raises(UserError, match="both directions"):
        call(module)


def test_a_table_for_another_pack_is_an_error_on_cpu():
    with pytest.raises(ValueError, match="do not fill a pack"):
        call(cu_seq_lens_q=torch.tensor([0, 5, 11], dtype=torch.int32))


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "path", "why"),
    [
        ((4, 2, 128), torch.bfloat16, {}, "varlen", ""),
        ((4, 2, 128), torch.bfloat16, {"window": 512, "scale": 0.1}, "varlen", ""),
        ((4, 2, 80), torch.float16, {}, "varlen", ""),
        ((4, 2, 128), torch.float32, {}, "flex", "float32"),
        ((4, 2, 288), torch.bfloat16, {}, "flex", "head_dim 288"),
        ((4, 2, 20), torch.bfloat16, {}, "flex", "head_dim 20"),
        ((4, 2, 128), torch.bfloat16, {"softcap": 30.0}, "flex", "softcap"),
        ((4, 2, 128), torch.bfloat16, {"sinks": torch.zeros(4)}, "flex", "sinks"),
        ((4, 2, 128), torch.bfloat16, {"dropout": 0.1}, "documents", "dropout"),
    ],
)
def test_path_on_cuda(shape, dtype, options, path, why):
    heads, kv_heads, head_dim = shape
    q, k, v = (torch.empty(1, h, 16, head_dim, dtype=dtype, device="meta") for h in (heads, kv_heads, kv_heads))
    chosen, reason = choose_path(q, k, v, **options, device_type="cuda")
    assert chosen == path and why in reason
    assert choose_path(q, k, v, **options, device_type="cpu")[0] == "documents"


def test_value_heads_of_another_size_go_to_flex():
    q, v = torch.empty(1, 4, 16, 64, dtype=torch.bfloat16), torch.empty(1, 4, 16, 32, dtype=torch.bfloat16)
    assert choose_path(q, q, v, device_type="cuda")[0] == "flex"


SIGNATURES = {
    "torch 2.11": ["query", "cu_seq_q", "scale", "window_size", "enable_gqa"],
    "no grouping keyword": ["query", "cu_seq_q", "scale", "window_size"],
    "causal flag": ["query", "cu_seq_q", "is_causal"],
}


@pytest.mark.parametrize("accepts", SIGNATURES.values(), ids=SIGNATURES.keys())
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_call_follows_the_signature(monkeypatch, accepts, window):
    """The kernel needs CUDA; a stand-in with its documented meaning shows that the arguments are translated right."""

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), scale=None, is_causal=False, **options):
        assert set(options) <= set(accepts) and cu_q is cu_k and max_q == max_k == 12
        left, right = (-1, 0) if is_causal else window_size
        assert right == 0  # causal
        if q.shape[1] != k.shape[1]:
            assert options == {"enable_gqa": True}
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        lengths = cu_q.diff().tolist()
        out = naive_attention(q, k, v, lengths, scale=scale, window=None if left < 0 else left + 1)
        return out[0].transpose(0, 1)

    monkeypatch.setattr(varlen_attention, "_ACCEPTS", frozenset(accepts))
    monkeypatch.setattr(varlen_attention, "varlen_attn", kernel)
    q, k, v = random_qkv(4, 2, 20, 8)
    cu = torch.tensor([0, 12, 20], dtype=torch.int32)
    scale = 0.3 if "scale" in accepts else 8**-0.5
    half = q.bfloat16()
    if window is not None and "window_size" not in accepts:
        assert "no sliding window" in varlen_cannot(half, half, half, window=window)
        return
    out = attend_varlen(q, k, v, cu, 12, scale=scale, window=window)
    assert worst([out], [naive_attention(q, k, v, [12, 8], scale=scale, window=window)]) < 1e-12


def test_a_fixed_scale_kernel_refuses_another_scale(monkeypatch):
    monkeypatch.setattr(varlen_attention, "_ACCEPTS", frozenset(SIGNATURES["causal flag"]))
    q = torch.empty(1, 2, 4, 16, dtype=torch.bfloat16)
    assert varlen_cannot(q, q, q, scale=0.25) is None
    assert "fixed scale" in varlen_cannot(q, q, q, scale=0.3)


FLASH = {
    "2": [
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "deterministic",
        "max_seqlen_q",
        "max_seqlen_k",
    ],
    "3, returns the log-sum-exp": ["softmax_scale", "causal", "window_size", "softcap", "max_seqlen_q", "max_seqlen_k"],
    "4, asks for no maximum": ["softmax_scale", "causal", "window_size", "softcap"],
}


@pytest.mark.parametrize("release", FLASH)
@pytest.mark.parametrize("options", [{}, {"window": 3, "scale": 0.3}, {"softcap": 2.0}])
def test_flash_packages_are_called_by_their_own_signature(monkeypatch, release, options):
    """The kernels need CUDA; a stand-in with their documented meaning shows that the arguments are translated right."""
    seen = set()

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, **given):
        seen.update(given)
        assert causal and set(given) <= set(FLASH[release]) and given.get("max_seqlen_q", 12) == 12
        left, right = given.get("window_size", (-1, 0))
        assert right == 0
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        lengths = cu_seqlens_q.diff().tolist()
        window = None if left < 0 else left + 1
        scale, softcap = softmax_scale, given.get("softcap")
        out = naive_attention(q, k, v, lengths, scale=scale, window=window, softcap=softcap)[0].transpose(0, 1)
        return (out, None) if release.startswith("3") else out

    monkeypatch.setattr(flash_attention, "_function", lambda name: flash_attn_varlen_func)
    names = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *FLASH[release]]
    monkeypatch.setattr(flash_attention, "_accepts", lambda name: frozenset(names))
    q, k, v = random_qkv(4, 2, 20, 8)
    cu = torch.tensor([0, 12, 20], dtype=torch.int32)
    out = attend_flash("flash3", q, k, v, cu, 12, **options)
    assert worst([out], [naive_attention(q, k, v, [12, 8], **options)]) < 1e-12
    assert ("deterministic" in seen) == ("deterministic" in FLASH[release])


def test_a_flash_package_says_why_it_cannot(monkeypatch):
    half = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16)
    assert "for CUDA" in flash_attention.flash_cannot("flash3", half, half, half)
    monkeypatch.setattr(flash_attention, "flash_missing", lambda name: None)
    monkeypatch.setattr(flash_attention, "_accepts", lambda name: frozenset(["q"]))
    assert flash_attention.flash_cannot("flash3", half, half, half) is None
    assert "window" in flash_attention.flash_cannot("flash3", half, half, half, window=3)
    assert "softcap" in flash_attention.flash_cannot("flash3", half, half, half, softcap=3.0)
    assert "sinks" in flash_attention.flash_cannot("flash3", half, half, half, sinks=torch.zeros(2))
    assert "float32" in flash_attention.flash_cannot("flash3", half.float(), half.float(), half.float())


def test_our_triton_attention_says_what_it_cannot(monkeypatch):
    half = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16)
    cannot = triton_attention.triton_attention_cannot
    assert "for CUDA" in cannot(half, half, half)
    monkeypatch.setattr(triton_attention, "kernels_missing", lambda kind, index: None)
    for head_dim in range(8, 257, 8):
        x = torch.empty(1, 2, 4, head_dim, dtype=torch.float16)
        assert cannot(x, x, x, window=3, softcap=2.0, scale=0.3) is None
        assert triton_attention.padded(head_dim) in triton_attention._HOPPER.keys() & triton_attention._SMALL.keys()
    wide = torch.empty(1, 2, 4, 264, dtype=torch.bfloat16)
    for refused, options in {
        "264": {},
        "positive scale": {"scale": 0.0},
        "sinks": {"sinks": wide},
        "dropout": {"dropout": 0.1},
    }.items():
        x = wide if refused == "264" else half
        assert refused in cannot(x, x, x, **options)
    assert "float32" in cannot(half.float(), half.float(), half.float())
    assert "another size" in cannot(half, half, half[..., :32])
    assert attention.path_cannot("triton", half, half, half) is None


def test_our_triton_attention_is_known_to_compilers_and_to_recompute():
    """Shapes and types of its operators without running them; what they return is kept like torch's own attention."""
    q, k = (torch.empty(10, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (12, 2))
    out, level, bounds = triton_attention.packed_attention(
        q, k, k, torch.empty(3, dtype=torch.int32, device="meta"), 1.0, 0, 0.0
    )
    assert (out.shape, level.shape, bounds.shape) == (q.shape, (6, 10, 2), (2, 10)), "a group of six: packs of two"
    grads = triton_attention.packed_attention_backward(out, q, k, k, out, level, bounds, 1.0, 0, 0.0)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in (q, k, k)]
    kept = {str(op) for op in recompute._attention()}
    assert {"headway.packed_attention.default", "torch_attn._varlen_attn.default"} <= kept


def test_a_measured_path_is_taken_only_where_it_can_compute_the_call(monkeypatch):
    q = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(
        attention, "path_cannot", lambda path, *call, **options: "a cap" if options["softcap"] else None
    )
    assert choose_path(q, q, q, device_type="cuda", chosen="flash3") == ("flash3", "measured fastest")
    assert choose_path(q, q, q, softcap=2.0, device_type="cuda", chosen="flash3")[0] == "flex"


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0, "scale": 0.7}, {"sinks": True, "window": 5}])
@pytest.mark.parametrize("heads", [4, 6])
def test_flex_forward_equals_the_naive_reference(options, heads):
    """Its backward exists on CUDA only and is checked there. The table's end is repeated, as bucketed tables do."""
    if options.get("sinks"):
        options = options | {"sinks": torch.linspace(-1, 1, heads, dtype=torch.float64)}
    q, k, v = random_qkv(heads, 2, 19, 16)
    cu = torch.tensor([0, 7, 8, 19, 19, 19], dtype=torch.int32)
    narrow = options | ({"sinks": options["sinks"].float()} if "sinks" in options else {})
    out = attend_flex(q.float(), k.float(), v.float(), cu, **narrow)
    assert worst([out.double()], [naive_attention(q, k, v, [7, 1, 11], **options)]) < 1e-5


def test_flex_shares_one_mask_between_layers_and_forgets_it_with_the_batch():
    from headway.model import flex_attention

    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    first = flex_attention._block_mask(cu, 9, None)
    assert flex_attention._block_mask(cu, 9, None) is first
    assert flex_attention._block_mask(cu, 9, 3) is not first
    assert flex_attention._block_mask(cu.clone(), 9, None) is not first
    known = len(flex_attention._MASKS)
    del cu
    assert len(flex_attention._MASKS) < known


def test_attention_of_reads_nested_text_configs():
    from headway.model.forward import attention_of
    from headway.model.load import load_model
    from model.tiny_models import BASE

    model = load_model(config=BASE | {"model_type": "llama"})
    assert attention_of(model) == attention_of(nn.Sequential(model)) == NAME
