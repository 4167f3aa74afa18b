"""Our Triton kernels in Triton's interpreter on the CPU, against float64 on odd shapes; and planted faults.

Needs Triton, which the CPU wheel of torch does not bring: `make test-kernels`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from model.interpreted import ask_for_the_interpreter

if not torch.cuda.is_available():
    ask_for_the_interpreter()

from headway.data.batch import IGNORE
from headway.model.kernels import linear_loss, triton_kernels
from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.loss_case import loss_case
from headway.model.kernels.measure import choose, compare
from headway.model.kernels.norm import plain_norm
from headway.model.kernels.triton_kernels import triton_cross_entropy, triton_residual_norm
from headway.model.loss import loss_sum

pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` runs this in its interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def logits_of(rows, vocabulary, dtype, spread=3.0):
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * spread).to(DEVICE, dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator).to(DEVICE)
    labels[1::3] = IGNORE
    return logits, labels


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (1e-2, 0.0), (1e-2, 0.3)])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"),
    [
        (1, 131, torch.float32),  # one row, not a multiple of 8
        (5, 1, torch.float32),
        (4, 1024, torch.float32),
        (3, 2 * 64 + 1, torch.bfloat16),
        (2, 16384 + 5, torch.float32),  # a second block of five columns
    ],
)
def test_cross_entropy_equals_float64(rows, vocabulary, dtype, z_loss, smoothing):
    logits, labels = logits_of(rows, vocabulary, dtype)
    wide = logits.double().requires_grad_()
    expected = loss_sum(wide, labels, z_loss=z_loss, label_smoothing=smoothing)
    expected.loss.backward()
    forward_only = triton_cross_entropy(logits.clone(), labels, z_loss, smoothing, False).sum(0)
    logits[labels == IGNORE] = float("nan")  # what an ignored row holds must not matter
    each = triton_cross_entropy(logits, labels, z_loss, smoothing, True)
    assert torch.allclose(each[:, 1].double(), expected.each, rtol=1e-5, atol=1e-6)
    sums = each.sum(0)
    found = torch.stack([expected.loss.detach(), expected.nll_sum])
    assert torch.allclose(sums.double(), found, rtol=1e-5, atol=1e-6)
    assert torch.allclose(forward_only.double(), found, rtol=1e-5, atol=1e-6)
    assert compare([logits.double()], [wide.grad]) < BOUND[dtype]


def test_the_gradient_is_written_into_rows_that_lie_apart():
    logits, labels = logits_of(4, 40, torch.float32)
    wide = torch.full((4, 64), 7.0, device=DEVICE)
    wide[:, :40] = logits
    triton_cross_entropy(wide[:, :40], labels, 0.0, 0.0, True)
    triton_cross_entropy(logits, labels, 0.0, 0.0, True)
    assert torch.equal(wide[:, :40], logits) and bool((wide[:, 40:] == 7.0).all())


def test_no_row_at_all():
    logits, labels = torch.zeros(0, 17, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert triton_cross_entropy(logits, labels, 0.0, 0.0, True).shape == (0, 2)
    x = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    normed, total = triton_residual_norm(x, x.detach(), torch.ones(8, device=DEVICE), 1e-6)
    (normed.sum() + total.sum()).backward()
    assert x.grad.shape == (0, 8)


@pytest.mark.parametrize("modes", [{"z_loss": 0.0, "label_smoothing": 0.0}, {"z_loss": 1e-3, "label_smoothing": 0.1}])
def test_head_and_loss_by_triton_pass_the_check_before_use(monkeypatch, modes):
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS_TRITON", 5 * 203)  # several chunks, the last one ragged
    found = choose(_loss_case(modes), 60)
    result = next(each for each in found.results if each.name == "triton")
    assert not result.wrong and result.gradient_error < 1e-5, result


@pytest.mark.parametrize("fault", ["the last block is lost", "an ignored row is trained", "its z-loss is lost"])
def test_a_wrong_kernel_is_named_and_never_used(monkeypatch, fault):
    real = triton_cross_entropy

    def wrong(logits, labels, z_loss, smoothing, gradient):
        if fault == "the last block is lost":
            logits[:, -3:] = -30.0
        if fault == "an ignored row is trained":
            labels = labels.clamp_min(0)
        return real(logits, labels, 0.0 if fault == "its z-loss is lost" else z_loss, smoothing, gradient)

    monkeypatch.setattr(linear_loss, "triton_cross_entropy", wrong)
    found = choose(_loss_case({"z_loss": 1e-3, "label_smoothing": 0.0}), 60)
    result = next(each for each in found.results if each.name == "triton")
    assert result.wrong and max(result.error, result.gradient_error) < math.inf and found.chosen != "triton"


def _loss_case(modes):
    """The run's own case, of the plain candidate and ours, which is not refused for want of a card."""
    case = loss_case(torch.nn.Linear(16, 203, bias=False).to(DEVICE), 40, torch.float32, DEVICE, **modes)
    named = {each.name: each for each in case.candidates}
    ours = replace(named["triton"], cannot=lambda: None)
    return replace(case, candidates=[named["eager"], ours], rows=40, check_rows=32)


@pytest.mark.parametrize(
    ("rows", "width", "branch", "stream"),
    [
        (1, 64, torch.float32, torch.float32),
        (9, 80, torch.float32, torch.float32),
        (30, 33, torch.float32, torch.float32),  # more rows than programs, unevenly
        (7, 96, torch.bfloat16, torch.float32),  # as autocast leaves them
        (7, 128, torch.bfloat16, torch.bfloat16),
    ],
)
def test_residual_norm_equals_float64(rows, width, branch, stream):
    def inputs(count):
        generator = torch.Generator().manual_seed(3)
        x, residual = (torch.randn(count, width, generator=generator).to(DEVICE) for _ in range(2))
        weight = (torch.rand(width, generator=generator) + 0.5).to(DEVICE)
        return x.to(branch).requires_grad_(), residual.to(stream).requires_grad_(), weight.requires_grad_()

    def plain(x, residual, weight):
        return plain_norm(x + residual, weight, 1e-6), x + residual

    def ours(x, residual, weight):
        return triton_residual_norm(x, residual, weight, 1e-6)

    def without_the_sum(x, residual, weight):
        normed, total = triton_residual_norm(x, residual, weight, 1e-6)
        return normed, total.detach() + 0 * normed

    candidates = [Candidate("eager", plain), Candidate("triton", ours), Candidate("planted", without_the_sum)]
    found = choose(Case("residual_norm", "", candidates, inputs, rows, rows), 60)
    results = {each.name: each for each in found.results}
    assert not results["triton"].wrong and results["triton"].error < BOUND[branch], results["triton"]
    assert results["planted"].wrong


def test_a_row_too_wide_is_refused():
    x = torch.zeros(1, triton_kernels.MAX_WIDTH + 1)
    with pytest.raises(ValueError, match="wider than"):
        triton_residual_norm(x, x, x[0], 1e-6)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headway.model.kernels import triton_source as source

def build(function, types, constants):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    made = triton.compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert len(made.asm["cubin"]) > 1000 and "st.local" not in made.asm["ptx"], "spills"

norm = {"x": "*bf16", "residual": "*fp32", "weight": "*fp32", "total": "*fp32", "normed": "*fp32", "scale": "*fp32",
        "width": "i32", "eps": "fp32"}
back = {name: "*fp32" for name in ("grad_normed", "grad_total", "total", "weight", "scale", "grad", "shares")}
loss = {"logits": "*bf16", "stride": "i32", "labels": "*i64", "each": "*fp32", "z_loss": "fp32", "smoothing": "fp32"}
build(source.residual_norm_forward, norm, {"BLOCK": 4096})
build(source.residual_norm_backward, {**back, "rows": "i32", "width": "i32"}, {"TURNS": 32, "BLOCK": 4096})
build(source.cross_entropy, loss, {"VOCABULARY": 151936, "IGNORE": -100, "GRADIENT": True, "BLOCK": 16384})
"""


def test_all_three_compile_for_hopper_without_one(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    path = tmp_path / "build.py"
    path.write_text(COMPILE)
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
