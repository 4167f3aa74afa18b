"""Packed against separate documents: logits and gradients of real model classes through the one call site."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from headway.account.errors import UserError
from headway.data.batch import IGNORE
from headway.model.forward import attention_of, call_arguments, forward_logits, real_token_mask
from headway.model.loss import loss_sum
from model.tiny_models import ATTENTION_FAMILIES, VOCAB, batch_of, documents, tiny

PACKS = {
    "mixed, padded to a prime": ([9, 1, 17, 4], 37),
    "one document": ([23], 23),
    "single tokens": ([1] * 19, 19),
}


def gradients(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def separately(model, docs):
    """Logits of each document alone, and gradients of the summed cross entropy, one document at a time.

    Goes around Headway: a plain call of one document, torch's own cross entropy on labels shifted here.
    """
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    logits = [own(input_ids=d[None], use_cache=False).logits[0] for d in docs]
    pairs = [(x[:-1], d[1:]) for x, d in zip(logits, docs, strict=True) if len(d) > 1]
    total = sum(F.cross_entropy(x, labels, reduction="sum") for x, labels in pairs)
    if not pairs:  # nothing to predict anywhere
        return [x.detach() for x in logits], [torch.zeros_like(p) for p in own.parameters()]
    return [x.detach() for x in logits], gradients(own, total)


def compare(model, docs, batch, tolerance):
    logits = forward_logits(model, batch)
    assert logits.shape == (*batch.input_ids.shape, VOCAB)
    grads = gradients(model, loss_sum(logits, batch.labels).loss)
    reference, reference_grads = separately(model, docs)
    flat = logits.detach().flatten(0, 1)
    starts = [int(batch.cu_seqlens[i]) for i in range(len(batch.documents)) if batch.documents[i] >= 0]
    largest = max(float(x.abs().max()) for x in reference)
    worst = max(
        float((flat[start : start + len(x)] - x).abs().max()) for start, x in zip(starts, reference, strict=True)
    )
    assert worst <= tolerance * largest
    scale = max(float(g.norm()) for g in reference_grads if g is not None)
    for got, expected in zip(grads, reference_grads, strict=True):
        if expected is None or got is None:
            assert (expected is None or not expected.any()) and (got is None or not got.any())
        else:
            assert float((got - expected).norm()) <= tolerance * max(scale, 1e-3)


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_packed_documents_equal_separate_ones(family):
    model = tiny(family)
    assert attention_of(model) == "headway"
    for lengths, width in PACKS.values():
        docs = documents(lengths)
        compare(model, docs, batch_of([docs], width), 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_in_float64_the_difference_vanishes(family):
    # Rotary tables and norms stay float32 inside transformers, on both sides alike.
    model = tiny(family).double()
    docs = documents([9, 1, 17, 4])
    compare(model, docs, batch_of([docs], 37), 1e-6 if family == "llama" else 1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral", "gemma3"])
@pytest.mark.parametrize("attention", ["headway", "sdpa", "eager"])
def test_rectangular_rows_under_every_implementation(family, attention):
    docs = documents([9, 1, 17, 4])
    compare(tiny(family, attention=attention), docs, batch_of([[d] for d in docs], 19), 1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packs_under_transformers_own_attention(attention):
    docs = documents([9, 1, 17, 4])
    compare(tiny("mistral", attention=attention), docs, batch_of([docs], 37), 1e-5)


@pytest.mark.parametrize("attention", ["headway", "sdpa", "eager"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_of_padding_gives_finite_logits_and_zero_gradients(attention, packed):
    """What a rank without data computes: it must take part, teach nothing and stay finite."""
    model = tiny("mistral", attention=attention)
    batch = batch_of([[]] if packed else [[], []], 9, packed=packed)
    logits = forward_logits(model, batch)
    assert logits.isfinite().all()
    loss = loss_sum(logits, batch.labels)
    assert loss.loss.item() == 0 and loss.tokens.item() == 0
    for gradient in gradients(model, loss.loss):
        assert gradient is not None and not gradient.any()


def test_rows_of_padding_among_real_rows_change_nothing():
    model = tiny("llama", attention="sdpa")
    docs = documents([9, 4])
    with_padding = batch_of([[docs[0]], [], [docs[1]]], 9)
    assert real_token_mask(with_padding).sum(1).tolist() == [9, 1, 4]
    compare(model, docs, with_padding, 1e-5)


def test_the_document_table_may_be_padded_with_empty_documents():
    model, docs = tiny("mistral"), documents([9, 4])
    batch = batch_of([docs], 13)
    longer = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:].expand(3)])
    padded = dataclasses.replace(batch, cu_seqlens=longer)
    assert torch.equal(forward_logits(model, padded), forward_logits(model, batch))


def test_an_end_token_equal_to_the_padding_id_keeps_its_label_and_its_place():
    """P15, R8: nothing in the call may look at ids."""
    docs = [torch.tensor([5, 0, 7, 0]), torch.tensor([0, 0, 3])]
    batch = batch_of([docs], 11)
    assert int((batch.labels == 0).sum()) == 3
    compare(tiny("llama", pad_token_id=0, eos_token_id=0), docs, batch, 1e-5)


def planted_calls(batch):
    good = call_arguments("sdpa", batch)
    ones = torch.ones_like(batch.input_ids)
    positions = torch.arange(batch.slots)[None]
    merged = batch.cu_seqlens[[0, 2, 3]]
    table = call_arguments("headway", batch)
    return {
        "use_cache left at its default": ("sdpa", {k: v for k, v in good.items() if k != "use_cache"}),
        "all-ones mask": ("sdpa", good | {"attention_mask": ones}),
        "cu_seq_lens that sdpa does not read": ("sdpa", table | {"position_ids": positions}),
        # Rotary positions are relative: only a model with absolute ones can tell.
        "positions not restarted": ("headway", table | {"position_ids": positions}, "gpt2"),
        "two documents merged": ("headway", table | {"cu_seq_lens_q": merged, "max_length_q": 22}),
    }


@pytest.mark.parametrize("fault", planted_calls(batch_of([documents([9, 13, 5])])))
def test_the_comparison_catches_planted_calls_that_leak(fault):
    docs = documents([9, 13, 5])
    batch = batch_of([docs])
    attention, arguments, *family = planted_calls(batch)[fault]
    model = tiny(*(family or ["llama"]), attention=attention)
    model.config.use_cache = True
    reference, _ = separately(model, docs)
    good = forward_logits(model, batch)[0].detach()
    planted = model(**arguments).logits[0].detach()
    assert float((good[9:22] - reference[1]).abs().max()) < 1e-4
    assert float((planted[9:22] - reference[1]).abs().max()) > 1e-2


def test_a_model_that_drops_keyword_arguments_is_an_error_not_a_leak():
    """StableLM does not hand its keyword arguments to its attention."""
    docs = documents([3, 4])
    with pytest.raises(UserError, match="StableLmAttention got no document table"):
        forward_logits(tiny("stablelm", attention="headway"), batch_of([docs]))
    model = tiny("stablelm")
    assert attention_of(model) == "sdpa"
    compare(model, docs, batch_of([docs]), 1e-5)


def test_compiled_layers_see_the_documents_and_are_not_compiled_per_length():
    torch._dynamo.reset()
    compiled_graphs = []

    def counting(graph, inputs):
        compiled_graphs.append(graph)
        return graph.forward

    model = tiny("qwen3", num_hidden_layers=1)
    plain = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend=counting)
    seen = []
    for seed, lengths in enumerate(([9, 1, 20], [30], [2, 3, 25], [1] * 30)):
        batch = batch_of([documents(lengths, seed)])
        assert torch.allclose(forward_logits(model, batch), forward_logits(plain, batch), atol=1e-5)
        seen.append(len(compiled_graphs))
    assert seen[1] == seen[-1] or seen[2] == seen[-1]  # at most one more for a length that turned out to vary
    torch._dynamo.reset()


def test_labels_of_the_last_token_are_ignored_in_the_helper_itself():
    batch = batch_of([documents([3, 2])], 6)
    assert (batch.labels[0] == IGNORE).tolist() == [False, False, True, False, True, True]
