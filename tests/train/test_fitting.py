"""The recompute level: the estimate against what autograd really keeps, the least that fits, and the rehearsal."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.account.errors import UserError
from headway.account.shape import ModelShape
from headway.config.load import load_run
from headway.config.optim import OptimConfig
from headway.config.train import LossConfig
from headway.model.head import install_loss_head
from headway.model.kernels.linear_loss import chunked_linear_loss
from headway.model.load import load_model
from headway.model.recompute import set_recompute
from headway.parallel import memory as machine_memory
from headway.parallel.mesh import Layout
from headway.parallel.wrap import wrap
from headway.plan.activations import States, Work, estimate, ladder, least_that_fits
from headway.train import fitting
from headway.train.clock import StepClock
from headway.train.figures import Local
from headway.train.memory import Fit
from headway.train.model import shape_of
from headway.train.optim import build_optimizers
from headway.train.step import Learner, OutOfMemory
from model.tiny_models import batch_of, documents
from tiny import config, run_file
from train.running import history, run

SIZES = {
    "llama": config(hidden_size=64, intermediate_size=176, num_hidden_layers=3, vocab_size=320),
    "qwen3": config(model_type="qwen3", hidden_size=64, intermediate_size=192, num_hidden_layers=3, head_dim=32),
    "llama_gqa": config(hidden_size=128, num_attention_heads=8, num_key_value_heads=1, intermediate_size=256),
    "mistral": config(model_type="mistral", hidden_size=64, intermediate_size=224, num_hidden_layers=2, head_dim=16),
}


def kept_by_autograd(model: torch.nn.Module, batch: Any, dtype: torch.dtype) -> float:
    """Bytes of distinct storages that the layers keep for backward, weights and their casts left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {
        tuple(p.T.shape) for p in model.parameters() if p.ndim == 2
    }
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    from headway.model.forward import call_arguments

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        arguments = call_arguments("headway", batch)
        hidden = model.model(**arguments).last_hidden_state  # type: ignore[operator, union-attr]
    del hidden
    return float(sum(found.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", list(SIZES))
def test_the_estimate_is_what_autograd_keeps(family: str, dtype: torch.dtype) -> None:
    model = load_model(config=SIZES[family], seed=0)
    batch = batch_of([documents([131, 40, 300])], 501)
    batch.input_ids.clamp_(max=300)
    real = kept_by_autograd(model, batch, dtype)
    work = Work(batch.slots, dtype.itemsize, 4, attention_bytes=4, logit_copies=0)
    predicted = estimate(shape_of(model), work, States(0, 0, 0, 0), "none", device=False).activations
    assert 0.85 < predicted / real < 1.25, f"{predicted / real:.3f}"


def test_every_further_level_keeps_less_and_full_keeps_the_inputs() -> None:
    shape = ModelShape.from_config(config(num_hidden_layers=8, hidden_size=512, intermediate_size=1408, head_dim=64))
    work = Work(4096, 2, 2)
    levels = ladder(8, offload=True)
    assert levels == ["none", "selective", 2, 4, 6, "full", "offload"]
    held = [estimate(shape, work, States(1, 1, 1, 1), level).activations for level in levels]
    assert held == sorted(held, reverse=True) and len(set(held)) == len(held)
    assert held[-2] == 8 * 4096 * 512 * 2 and held[-1] == 0
    assert ladder(1) == ["none", "selective", "full"]


def test_the_least_that_fits_is_chosen_and_the_last_where_none_does() -> None:
    shape = ModelShape.from_config(config(num_hidden_layers=8, hidden_size=512))
    work, states = Work(4096, 2, 2), States(1e9, 1e9, 2e9, 0)
    levels = ladder(8)
    totals = [estimate(shape, work, states, level).total for level in levels]
    for level, total in zip(levels, totals, strict=True):
        assert least_that_fits(shape, work, states, total, levels)[0] == level
    assert least_that_fits(shape, work, states, 1.0, levels)[0] == "full"


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_selective_runs_no_product_twice_and_full_runs_all() -> None:
    model = load_model(config=config(num_hidden_layers=2), seed=0, attention="sdpa")
    counts = {}
    for level in ("none", "selective", 1, "full"):
        set_recompute(model, level)  # type: ignore[arg-type]
        loss = model(input_ids=torch.arange(16)[None], use_cache=False).logits.sum()
        with _Products() as products:
            loss.backward()
        counts[level] = products.count
    assert counts["selective"] == counts["none"] < counts[1] < counts["full"]
    assert counts["full"] - counts[1] == counts[1] - counts["none"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return run_file(tmp_path, train={"steps": 2})


@pytest.mark.parametrize(("level", "recomputed"), [("selective", False), ("1", True), ("full", True), ("auto", False)])
def test_every_level_trains_alike_and_counts_its_flops(path: Path, level: str, recomputed: bool) -> None:
    run(path, "name=none", "model.recompute=none")
    run(path, "name=other", f"model.recompute={level}", "model.offload=activations")
    for left, right in zip(history(path, "none").kept, history(path, "other").kept, strict=True):
        assert left.loss == right.loss and left.grad_norm == right.grad_norm
        assert bool(right.flops.recompute) == recomputed and right.flops.useful == left.flops.useful
    facts = history(path, "other").sessions[-1].start.facts["memory"]
    assert "predicted peak" in facts[0]


def test_little_memory_makes_auto_recompute_and_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "memory_capacity", lambda *_: 1e5)
    done = run(path, "model.offload=activations", "log.quiet=false")
    assert "recompute offload" in history(path).sessions[-1].start.facts["memory"][0]
    assert "offload of activations is in force" in done.out + done.err


def test_a_rehearsal_goes_down_the_levels_and_leaves_no_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P24: what would fail at an unpredictable step fails before the first one, on the worst micro-batch."""
    run(path, "name=calm")
    original, seen = Learner.learn, []

    def short(self: Learner, parts: Any, trained: int, unreadable: bool = False, failure: Any = None) -> Any:
        seen.append((max(part.slots for part in parts), max(part.max_seqlen for part in parts)))
        if len(seen) < 3:
            raise OutOfMemory("rank 0: planted")
        return original(self, parts, trained, unreadable, failure)

    monkeypatch.setattr(Learner, "learn", short)
    choose = fitting.choose_level
    monkeypatch.setattr(
        fitting, "choose_level", lambda *args: fitting.Choice(**{**choose(*args).__dict__, "rehearse": True})
    )
    run(path, "name=rehearsed")
    assert seen[0] == (160, 128), "all slots, and the longest document"
    calm, rehearsed = history(path, "calm").kept, history(path, "rehearsed").kept
    assert [line.loss for line in calm] == [line.loss for line in rehearsed]
    assert rehearsed[0].flops.recompute, "the third level recomputes a layer"


def test_a_rehearsal_on_a_card_begins_where_the_estimate_may_be_wrong(path: Path) -> None:
    """The estimate errs towards more recompute: `none` is tried while it is within half of the memory there is. Not
    under FSDP2, where running out of memory may end the process."""
    settings = load_run(path, []).config
    module = load_model(config=config(), seed=0, attention="headway")
    whole = dataclasses.replace(wrap(module, None, Layout(), torch.float32), device=torch.device("cuda", 0))
    sharded = mock.patch.object(type(whole), "casts_itself", True)

    def first(share: float) -> list[Any]:
        shape = shape_of(module)
        need = estimate(shape, fitting._work(settings, whole), fitting._states(settings, whole, 1), "none").total
        with mock.patch.object(fitting, "memory_capacity", lambda *_: share * need):
            return fitting.choose_level(settings, shape, whole, 1, 1).levels

    assert first(1.01)[0] == first(0.7)[0] == "none" and "none" not in first(0.6)
    with sharded:
        assert first(1.01)[0] == "none" and "none" not in first(0.95)
    install_loss_head(module, chunked_linear_loss)
    assert fitting._work(settings, whole).logit_copies == 0, "no logits are kept"


def learner_of(module: torch.nn.Module) -> Learner:
    optimizers = build_optimizers(module, OptimConfig(lr=1e-2))
    return Learner(wrap(module, None, Layout(), torch.float32), optimizers, LossConfig(), 1.0, StepClock("cpu"))


def test_a_rehearsal_stands_in_for_what_of_the_optimizer_is_still_to_come(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume has the state already; and where there is no room for it, all ranks go to the next level."""
    settings = load_run(path, []).config
    module = load_model(config=config(), seed=0, attention="headway")
    learner, state = learner_of(module), 2 * 4 * sum(p.numel() for p in module.parameters())
    levels = ladder(2)
    choice = fitting.Choice(
        list(levels), estimate(shape_of(module), Work(8, 4, 4), States(0, 0, 0, 0), "none"), 0, state, True
    )
    told: list[str] = []
    fit = fitting.make_fit(settings, module, choice, lambda *words: told.append(str(words)))
    asked: list[float] = []

    def stand_in(size: float, device: torch.device) -> torch.Tensor:
        asked.append(size)
        if len(asked) < 3:
            raise torch.OutOfMemoryError("planted")
        learner._broken.look(torch.tensor(math.inf))  # fp16 at its first scale overflows in a rehearsal
        return torch.empty(0)

    monkeypatch.setattr(fitting, "stand_in", stand_in)
    said = fitting.rehearse(fit, learner, settings, 320, choice)
    assert fit.level == levels[2] and len(asked) == 3 and told == [] and f"goes to {levels[2]}" in said
    assert state <= asked[0] < 1.2 * state
    assert all(p.grad is None for p in module.parameters())
    batch = fitting.worst_batch(settings, 320)
    assert learner.update([batch], batch.trained_tokens)[3] == 1.0
    assert learner.detail is not None and not learner.detail.table[:, Local._fields.index("broken")].any()
    fitting.rehearse(fit, learner, settings, 320, choice)
    assert asked[-1] < 0.2 * state, "it is there by now"


def test_a_fixed_level_is_not_changed_behind_the_users_back(path: Path) -> None:
    settings = load_run(path, ["model.recompute=none"]).config
    module = load_model(config=config(), seed=0)
    choice = fitting.Choice(
        ["none"], estimate(shape_of(module), Work(8, 4, 4), States(0, 0, 0, 0), "none"), 1, 0, False
    )
    fit = fitting.make_fit(settings, module, choice, lambda *_: None)

    def failing(parts: Any) -> None:
        raise OutOfMemory("rank 3: out of memory")

    with pytest.raises(UserError, match=r"rank 3.*set model\.recompute=auto"):
        fit.run(failing, [batch_of([documents([9, 9])], 20)])
    assert isinstance(fit, Fit)


def test_a_resume_cuts_micro_batches_as_the_session_before(path: Path) -> None:
    settings = load_run(path, ["model.recompute=auto"]).config
    module = load_model(config=config(), seed=0)
    choice = fitting.Choice(
        ["full"], estimate(shape_of(module), Work(8, 4, 4), States(0, 0, 0, 0), "full"), 1, 0, False
    )
    made = [fitting.make_fit(settings, module, choice, lambda *_: None)]
    attempts: list[int] = []

    def failing_once(parts: Any) -> None:
        attempts.append(len(parts))
        if len(attempts) == 1:
            raise OutOfMemory("rank 3: out of memory")

    batches = [batch_of([documents([9, 9])], 20)]
    made[0].run(failing_once, batches)
    kept = fitting.parts_record(made[0], "card", 2)
    made += [
        fitting.make_fit(settings, module, choice, lambda *_: None, fitting.parts_before(*before))
        for before in [(kept, "card", 2), (kept, "card", 4), (kept, "another card", 2), ({}, "card", 2)]
    ]
    for fit in made[1:]:
        fit.run(failing_once, batches)
    assert attempts == [1, 2, 2, 1, 1, 1]


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine_memory, "_CGROUP", (tmp_path / "none", limit))
    limit.write_text("max\n")
    free = machine_memory.memory_capacity("cpu", 1)
    limit.write_text("1000000\n")
    assert machine_memory.memory_capacity("cpu", 1) < free


def test_what_a_container_has_in_use_already_is_not_counted_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "_CGROUP", (tmp_path / "memory.max",))
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 100000\nactive_file 0\n")
    monkeypatch.setattr(machine_memory.psutil, "Process", lambda: mock.Mock(memory_info=lambda: mock.Mock(rss=7)))
    assert machine_memory.memory_capacity("cpu", 2) == 300007


def test_optimizer_offload_needs_shards(path: Path) -> None:
    assert "set parallel.fsdp to 2 or more" in run(path, "model.offload=optimizer", expect=2).err
