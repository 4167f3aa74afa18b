"""One step: the gradient of the whole global batch, however it is split; nothing learned where nothing is to learn."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from data.memory_store import MemoryStore
from headway.account.errors import UserError
from headway.config.optim import OptimConfig
from headway.config.train import LossConfig
from headway.data.global_batch import Position
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted
from headway.guard.spikes.watcher import Limits
from headway.model.load import load_model
from headway.parallel.mesh import Layout
from headway.parallel.wrap import wrap
from headway.train.clock import StepClock
from headway.train.evaluate import Evaluator
from headway.train.optim import build_optimizers, gradient_norms, scale_gradients
from headway.train.step import Learner
from tiny import config

LENGTHS = [3, 40, 7, 22, 1, 31, 16, 9, 40, 2]


def make_stream(
    pack: str = "best_fit", sequences: int = 8, seed: int = 0, *, seq_len: int = 40, keep_tails: bool = True
) -> Stream:
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 320, n) for n in LENGTHS]
    # Very uneven labels: a mean of means over micro-batches or ranks would be far off (P10).
    masks = [(rng.random(n) < rng.choice([0.05, 1.0])).astype(np.uint8) for n in LENGTHS]
    masks[1][:] = 1
    view = View(
        [Weighted(MemoryStore(list(zip(documents, masks, strict=True)), vocab_size=320))],
        ViewOptions(seq_len=seq_len, overlong="split", keep_untrained=True, keep_tails=keep_tails),
    )
    return Stream(view, StreamOptions(pack=pack, slots=48, rows=3, sequences_per_step=sequences))  # type: ignore[arg-type]


def make_learner(model: torch.nn.Module, clip: float | None = None, **optim: object) -> Learner:
    replicas = wrap(model, None, Layout(), torch.float32)
    settings = OptimConfig(lr=1e-2, **optim)  # type: ignore[arg-type]
    return Learner(replicas, build_optimizers(model, settings), LossConfig(), clip, StepClock("cpu"))


def model(attention: str = "headway") -> torch.nn.Module:
    return load_model(config=config(), dtype="float32", attention=attention, seed=3)  # type: ignore[arg-type]


def gradients(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in module.parameters() if p.grad is not None])


def reference(stream: Stream) -> tuple[torch.Tensor, float]:
    """Slow and obvious: float64, one document at a time, one mean over all trained tokens."""
    module = model("eager").double()
    batch = stream.global_batch(Position())
    total = torch.zeros((), dtype=torch.float64)
    trained = 0
    pieces = stream.view.pieces
    for row in range(len(pieces)):
        store = stream.view.stores[int(pieces.store[row])]
        start, stop = int(pieces.start[row]), int(pieces.start[row] + pieces.length[row])
        ids = torch.from_numpy(np.asarray(store.tokens(int(pieces.doc[row]), start, stop)).astype(np.int64))
        mask = torch.from_numpy(np.asarray(store.mask(int(pieces.doc[row]), start, stop)).astype(bool))
        logits = module(input_ids=ids[None], use_cache=False).logits[0].double()
        nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        total = total + nll[mask[1:]].sum()
        trained += int(mask[1:].sum())
    assert trained == batch.trained_tokens
    (total / trained).backward()
    return gradients(module), float(total / trained)


def split_gradient(stream: Stream, world: int, attention: str) -> tuple[torch.Tensor, float]:
    """What `world` ranks would sum: each rank's micro-batches in turn, gradients adding up."""
    module = model(attention)
    learner = make_learner(module)
    batch = stream.global_batch(Position())
    sums = torch.zeros(2)
    for rank in range(world):
        sums += learner._accumulate(batch.micro_batches(rank, world), batch.trained_tokens)[0]
    return gradients(module), float(sums[1]) / batch.trained_tokens


@pytest.mark.parametrize(
    ("pack", "world", "attention"),
    [
        ("best_fit", 1, "headway"),
        ("best_fit", 3, "headway"),
        ("best_fit", 5, "headway"),
        ("none", 1, "sdpa"),
        ("none", 2, "sdpa"),
        ("none", 4, "headway"),
    ],
)
def test_gradient_is_that_of_one_concatenated_batch(pack: str, world: int, attention: str) -> None:
    stream = make_stream(pack, sequences=len(LENGTHS))
    expected, expected_nll = reference(stream)
    found, nll = split_gradient(stream, world, attention)
    assert nll == pytest.approx(expected_nll, rel=1e-5)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_nothing_is_learnt_from_what_stands_behind_the_last_label() -> None:
    """`data.keep_tails: false` is the same training: in the reference every document has its tail."""
    whole, ended = (make_stream(sequences=99, seed=7, seq_len=12, keep_tails=keep) for keep in (True, False))
    assert ended.view.overlong.tail_tokens == 19
    expected, expected_nll = reference(whole)
    found, nll = split_gradient(ended, 1, "headway")
    assert nll == pytest.approx(expected_nll, rel=1e-5)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    short = dataclasses.replace(ended.view.pieces, length=np.maximum(ended.view.pieces.length - 1, 1))
    planted = object.__new__(View)
    planted.__dict__ = {**ended.view.__dict__, "pieces": short}
    with pytest.raises(UserError, match="trained"):  # a label cut off with the tail does not pass in silence
        split_gradient(Stream(planted, ended.options), 1, "headway")


def test_a_planted_mean_of_means_is_caught() -> None:
    stream = make_stream(sequences=len(LENGTHS))
    expected, _ = reference(stream)
    module = model()
    learner = make_learner(module)
    parts = stream.global_batch(Position()).micro_batches(0, 1)
    for part in parts:
        learner._accumulate([part], max(1, part.trained_tokens) * len(parts))
    assert float((gradients(module) - expected).norm() / expected.norm()) > 1e-2


def test_a_step_returns_what_it_did_and_moves_the_weights() -> None:
    stream = make_stream(sequences=len(LENGTHS))
    module = model()
    before = copy.deepcopy(module.state_dict())
    batch = stream.global_batch(Position())
    loss, nll, norm, finite, *_ = make_learner(module).update(batch.micro_batches(0, 1), batch.trained_tokens).tolist()
    expected, expected_nll = reference(stream)
    assert loss == nll == pytest.approx(expected_nll, rel=1e-5) and finite == 1.0
    assert norm == pytest.approx(float(expected.norm()), rel=1e-4)
    assert any(not torch.equal(before[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    stream = make_stream(sequences=len(LENGTHS))
    module = model()
    learner = make_learner(module, clip=1.0, name=optimizer)
    batch = stream.global_batch(Position())
    micro = batch.micro_batches(0, 1)
    learner.update(micro, batch.trained_tokens)
    before = copy.deepcopy(module.state_dict())
    hook = module.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad * float("nan"))
    assert learner.update(micro, batch.trained_tokens)[3] == 0.0
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    hook.remove()
    assert learner.update(micro, batch.trained_tokens)[3] == 1.0, "the next clean step is taken"
    assert any(not torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_offloaded_weights_train_beside_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2's CPUOffloadPolicy: weights, gradients and optimizer state on the host, everything else on the GPU (here:
    the meta device, which no tensor of the host may meet)."""
    card = torch.device("meta")
    module = model()
    replicas = dataclasses.replace(wrap(module, None, Layout(), torch.float32), device=card)
    optimizers = build_optimizers(module, OptimConfig(lr=1e-2))
    learner = Learner(replicas, optimizers, LossConfig(), 1.0, StepClock("cpu"))
    assert learner.device == card

    def learn(*_: object) -> torch.Tensor:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        learner._broken.look(torch.ones(3, device=card))
        return torch.ones(2, device=card)

    told: list[torch.Tensor] = []
    monkeypatch.setattr(learner, "learn", learn)
    monkeypatch.setattr(optimizers, "step", told.append)
    nothing = Limits({}, {}, {})
    assert learner.update([], 1, nothing).device == learner.look([], 1).device == card
    assert [one.device for one in told] == [card] and learner.sample.moved.device == card


def test_norms_of_narrow_gradients_are_float32() -> None:
    module = torch.nn.Linear(257, 3, dtype=torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    for clipping in ("foreach", "eager"):
        norms = gradient_norms(module, clipping)
        assert float(norms.total) == pytest.approx(774**0.5, rel=1e-6), clipping
        assert norms.each.tolist() == pytest.approx([771**0.5, 3**0.5], rel=1e-6)


def test_clipping_scales_to_the_norm_and_reports_the_norm_before() -> None:
    module = torch.nn.Linear(4, 4)
    module.weight.grad, module.bias.grad = torch.full((4, 4), 3.0), torch.full((4,), 4.0)
    norm = scale_gradients(gradient_norms(module), 1.0, None)
    assert float(norm) == pytest.approx((16 * 9 + 4 * 16) ** 0.5)
    after = float(torch.cat([p.grad.flatten() for p in module.parameters()]).norm())
    assert after == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    module = model()
    optimizers = build_optimizers(module, OptimConfig(lr=1e-2, name=name, weight_decay=0.5))  # type: ignore[arg-type]
    decays = {
        id(p): group["weight_decay"]
        for item in optimizers.items
        for group in item.param_groups
        for p in group["params"]
    }
    assert set(decays) == {id(p) for p in module.parameters()}, "every parameter is in exactly one group"
    for key, parameter in module.named_parameters():
        assert decays[id(parameter)] == (0.0 if "norm" in key else 0.5), key


def test_evaluation_is_a_mean_over_tokens_not_over_batches() -> None:
    stream = make_stream(sequences=2)
    module = model()
    found = Evaluator(stream, 0, 1, torch.device("cpu")).run(wrap(module, None, Layout(), torch.float32))
    _, expected = reference(make_stream(sequences=len(LENGTHS)))
    assert found.nll == pytest.approx(expected, rel=1e-5) and module.training
    batches = list(stream.epoch(0))
    means = [
        Evaluator(_Only(stream, batch), 0, 1, torch.device("cpu")).run(wrap(module, None, Layout(), torch.float32)).nll  # type: ignore[arg-type]
        for batch in batches
        if batch.trained_tokens
    ]
    assert abs(float(np.mean(means)) - expected) > 1e-3, "the planted mean of means would not show on this data"


class _Only:
    """A stream of one global batch."""

    def __init__(self, stream: Stream, batch: object) -> None:
        self._batch = batch

    def global_batch(self, position: Position) -> object:
        from dataclasses import replace

        return replace(self._batch, next=Position(1))  # type: ignore[type-var]
