from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.batch import IGNORE
from headway.model import loss as loss_module
from headway.model.loss import loss_sum, per_document_nll


def reference(logits, labels, z_loss, label_smoothing):
    """float64, through torch's own cross entropy and autograd."""
    wide = logits.detach().double().requires_grad_()
    trained = labels != IGNORE
    flat, flat_labels = wide[trained], labels[trained]
    nll = F.cross_entropy(flat, flat_labels, reduction="sum")
    smooth = F.cross_entropy(flat, flat_labels, reduction="sum", label_smoothing=label_smoothing)
    total = smooth + z_loss * torch.logsumexp(flat, -1).square().sum()
    (gradient,) = torch.autograd.grad(total, wide)
    return total.detach(), nll.detach(), int(trained.sum()), gradient


def random_case(rows, vocab, seed, ignored=0.4, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORE
    return logits, labels


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    vocab=st.integers(2, 131),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    chunk=st.integers(1, 2000),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 999),
)
def test_value_and_gradient_equal_torch_in_float64(rows, vocab, z_loss, label_smoothing, chunk, ignored, seed):
    logits, labels = random_case(rows, vocab, seed, ignored)
    before, loss_module.CHUNK_ELEMENTS_CPU = loss_module.CHUNK_ELEMENTS_CPU, chunk
    try:
        result = loss_sum(logits, labels, z_loss=z_loss, label_smoothing=label_smoothing)
        (gradient,) = torch.autograd.grad(result.loss, logits)
    finally:
        loss_module.CHUNK_ELEMENTS_CPU = before
    total, nll, tokens, expected = reference(logits, labels, z_loss, label_smoothing)
    assert result.loss.dtype == torch.float32 and gradient.dtype == logits.dtype
    assert torch.allclose(result.loss.detach().double(), total, rtol=1e-5, atol=1e-5)
    assert torch.allclose(result.nll_sum.double(), nll, rtol=1e-5, atol=1e-5)
    assert result.tokens.item() == tokens
    assert torch.allclose(gradient.double(), expected, rtol=1e-4, atol=1e-5)
    assert not result.nll_sum.requires_grad


def test_float64_logits_stay_float64():
    logits, labels = random_case(9, 31, 0)
    wide = logits.detach().double().requires_grad_()
    result = loss_sum(wide, labels, z_loss=1e-3, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(result.loss, wide)
    total, _, _, expected = reference(wide, labels, 1e-3, 0.1)
    assert torch.allclose(result.loss, total, rtol=1e-12) and torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12)


def test_bfloat16_gradient_is_the_float32_one_rounded_once():
    """Scaled by the global batch inside float32: rounding before scaling would round twice."""
    logits, labels = random_case(50, 97, 1, dtype=torch.bfloat16)
    result = loss_sum(logits, labels, z_loss=1e-3)
    (gradient,) = torch.autograd.grad(result.loss / 37, logits)
    wide = logits.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(loss_sum(wide, labels, z_loss=1e-3).loss / 37, wide)
    assert gradient.dtype == torch.bfloat16 and torch.equal(gradient, exact.bfloat16())


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_without_a_trained_token_everything_is_exactly_zero_but_connected(z_loss, label_smoothing):
    weight = torch.randn(3, 5, requires_grad=True)
    logits = weight * torch.tensor([1.0, float("nan"), float("inf"), 0.0, -1.0])  # whatever padding slots compute
    logits.retain_grad()
    result = loss_sum(logits, torch.full((3,), IGNORE), z_loss=z_loss, label_smoothing=label_smoothing)
    result.loss.backward()
    assert result.loss.item() == 0 and result.nll_sum.item() == 0 and result.tokens.item() == 0
    assert not logits.grad.any() and weight.grad is not None


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_ignored_slots_do_not_reach_the_result(junk):
    logits, labels = random_case(20, 17, 2)
    dirty = torch.where((labels == IGNORE).unsqueeze(-1), junk, logits.detach()).requires_grad_()
    options = {"z_loss": 1e-3, "label_smoothing": 0.1}
    clean, soiled = loss_sum(logits, labels, **options), loss_sum(dirty, labels, **options)
    assert torch.equal(clean.loss, soiled.loss) and torch.equal(clean.nll_sum, soiled.nll_sum)
    (a,), (b,) = torch.autograd.grad(clean.loss, logits), torch.autograd.grad(soiled.loss, dirty)
    assert torch.equal(a, b) and not b[labels == IGNORE].any()


def test_a_target_of_no_probability_keeps_a_finite_gradient():
    logits = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    result = loss_sum(logits, torch.tensor([1]), z_loss=1e-2, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    total, _, _, expected = reference(logits, torch.tensor([1]), 1e-2, 0.1)
    assert result.loss.item() == pytest.approx(float(total), rel=1e-6)
    assert torch.allclose(gradient.double(), expected, rtol=1e-5, atol=1e-6)


def test_any_split_over_micro_batches_gives_the_same_sum_and_gradient():
    """P10: the mean of means is not formed anywhere."""
    logits, labels = random_case(60, 23, 3, ignored=0.7)
    whole = loss_sum(logits, labels, z_loss=1e-3)
    (expected,) = torch.autograd.grad(whole.loss / whole.tokens, logits)
    for sizes in ([1, 59], [10] * 6, [50, 7, 3]):
        parts = [loss_sum(x, y, z_loss=1e-3) for x, y in zip(logits.split(sizes), labels.split(sizes), strict=True)]
        tokens = sum(part.tokens for part in parts)
        (gradient,) = torch.autograd.grad(sum(part.loss for part in parts) / tokens, logits, retain_graph=True)
        assert torch.allclose(gradient, expected, atol=1e-7)
        mean_of_means = sum(part.loss / part.tokens.clamp_min(1) for part in parts) / len(parts)
        (planted,) = torch.autograd.grad(mean_of_means, logits)
        assert not torch.allclose(planted, expected, atol=1e-4)


def test_shapes_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="do not fit"):
        loss_sum(torch.zeros(1, 4, 9), torch.zeros(1, 5, dtype=torch.int64))


def test_nothing_but_the_logits_is_kept_for_backward():
    """The point of the chunks: no float32 tensor as large as the logits lives between forward and backward."""
    logits, labels = random_case(64, 101, 4, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss_sum(logits, labels, z_loss=1e-3)
    assert sorted(t.dtype for t in kept if t.numel() >= logits.numel()) == [torch.bfloat16]


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any), seed=st.integers(0, 99))
def test_per_document_sums_equal_each_document_alone(lengths, seed):
    logits, labels = random_case(sum(lengths), 13, seed)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    sums, squares, counts = per_document_nll(loss_sum(logits[None], labels[None]).each, labels[None], bounds)
    assert sums.shape == counts.shape == (len(lengths),) and not sums.requires_grad
    parts = zip(sums, squares, counts, logits.split(lengths), labels.split(lengths), strict=True)
    for nll, square, count, x, y in parts:
        _, expected, tokens, _ = reference(x, y, 0.0, 0.0)
        each = [float(reference(x[[at]], y[[at]], 0.0, 0.0)[1]) for at in range(len(y))]
        assert square.item() == pytest.approx(sum(one**2 for one in each), rel=1e-4, abs=1e-5)
        assert count.item() == tokens and nll.item() == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
