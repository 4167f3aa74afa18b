"""`fuse: auto` on a card: every importable candidate is right, and a fused model trains as the plain one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.data.batch import IGNORE
from headway.model.forward import forward_loss
from headway.model.head import install_loss_head
from headway.model.kernels.choose import Setting, install_kernels, measure_kernels
from headway.model.kernels.glu import gate_case, gated_mlps_of
from headway.model.kernels.loss_case import IMPLEMENTATIONS
from headway.model.kernels.measure import choose
from headway.model.kernels.whole import SUMS, _batch, shortened
from headway.model.load import load_model
from headway.model.precision import linear_to_float8
from headway.train.float8 import CAPABLE
from tiny import config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_candidate_is_wrong_and_the_model_stays_the_same(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    sizes = config(hidden_size=512, intermediate_size=1024, num_attention_heads=8, head_dim=64, vocab_size=32003)
    model = load_model(config=sizes, dtype="float32", attention="headway", seed=3).cuda()
    device = torch.device("cuda", 0)
    setting = Setting(4096, 0.5, dtype, device, "test")
    batch = _batch(32003).to(device)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        before = float(forward_loss(model, batch).loss.detach())
        measured = measure_kernels(model, setting, budget=20)
        # FlexAttention's float32 products may run in TF32: not used then, and named.
        exact = {"flex"} if dtype == torch.float32 else set()
        results = [(c.operation, r) for c in measured.choices for r in c.results if r.name not in exact]
        wrong = [(operation, r.name, r.reason) for operation, r in results if r.wrong]
        assert not wrong
        assert install_kernels(model, setting, measured).loss_head()
        after = float(forward_loss(model, batch).loss.detach())
    assert after == pytest.approx(before, rel=1e-4 if dtype == torch.float32 else 2e-2)


def test_a_gates_time_is_the_kernels_own():
    """0.5 GB go through it: milliseconds. Drawing its gradient on the host once took a second inside the clock."""
    sizes = config(hidden_size=256, intermediate_size=9728)
    mlp = gated_mlps_of(load_model(config=sizes, dtype="float32", attention="headway", seed=3).cuda())[0]
    found = choose(gate_case(mlp, 16384, torch.bfloat16, torch.device("cuda", 0)), 20)
    assert all(result.seconds < 0.1 for result in found.results if result.error is not None and not result.wrong)
    assert not any("slower on a small case" in result.reason for result in found.results)


def test_a_gradients_sums_are_the_same_twice_and_as_far_from_anothers():
    grad = torch.randn(5000, 4000, device="cuda")
    other = grad + 0.01 * torch.randn_like(grad)
    one, two = shortened(grad), shortened(other)
    assert one.numel() == SUMS and torch.equal(one, shortened(grad))
    assert float((two - one).norm()) == pytest.approx(float((other - grad).norm()), rel=0.05)


@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_a_batch_without_a_label_ends_under_every_head(name):
    """Liger's kernel divides by the rows, and a batch of padding has none."""
    model = load_model(config=config(), dtype="float32", attention="headway", seed=3).cuda()
    install_loss_head(model, IMPLEMENTATIONS[name])
    batch = _batch(320).to("cuda")
    empty = replace(batch, labels=torch.full_like(batch.labels, IGNORE), trained_tokens=0)
    loss = forward_loss(model, empty).loss
    loss.backward()
    assert float(loss.detach()) == 0 and not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("slots", [48, 37])
def test_float8_takes_any_number_of_slots(slots):
    """Its products want multiples of 16, and the weight's gradient sums over slots."""
    pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < CAPABLE:
        pytest.skip("this card multiplies nothing in 8 bits")
    plain = nn.Sequential(nn.Linear(64, 96, bias=False)).cuda().bfloat16()
    narrow = copy.deepcopy(plain)
    assert linear_to_float8(narrow, [])
    x = torch.randn(slots, 64, device="cuda", dtype=torch.bfloat16)
    for module in (plain, narrow):
        module(x).float().square().sum().backward()
    one, other = (module[0].weight.grad.float() for module in (plain, narrow))
    assert 0 < float((other - one).norm() / one.norm()) < 0.2
