"""Model and optimizers through a checkpoint, bit for bit; each trap of the usual helpers is shown to be one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from guard_helpers import Tiny, same, snapshot, tiny_model, tiny_optimizer, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from headway.account.errors import UserError
from headway.guard.checkpoint import CheckpointStore
from headway.guard.training_state import capture, restore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "run-a")


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    train(model, optimizer, steps)
    return model, optimizer


def test_a_fresh_process_goes_on_as_if_nothing_had_happened(store: CheckpointStore) -> None:
    model, optimizer = trained()
    ref = store.save(3, capture(model, [optimizer]), {}, {})
    before = snapshot(model, optimizer)
    expected = train(model, optimizer, 3, 3)
    other = tiny_model(5)
    other_optimizer = tiny_optimizer(other)
    assert same(before, snapshot(other, other_optimizer)) != []
    assert restore(store, ref, other, [other_optimizer]).notes == []
    assert same(before, snapshot(other, other_optimizer)) == []
    assert other.unused not in other_optimizer.state  # it never had a gradient
    assert train(other, other_optimizer, 3, 3) == expected


def test_a_running_model_is_rolled_back(store: CheckpointStore) -> None:
    model, optimizer = trained()
    ref = store.save(3, capture(model, [optimizer]), {}, {})
    before, expected = snapshot(model, optimizer), train(model, optimizer, 2, 3)
    (model.unused.sum() + model(torch.tensor([1])).sum()).backward()
    optimizer.step()  # now the unused parameter has state, too
    assert len(optimizer.state) == 6
    restore(store, ref, model, [optimizer])
    assert same(before, snapshot(model, optimizer)) == [] and len(optimizer.state) == 5
    assert train(model, optimizer, 2, 3) == expected


def test_a_save_before_the_first_step_changes_nothing(store: CheckpointStore) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    ref = store.save(0, capture(model, [optimizer]), {}, {})
    assert not optimizer.state
    expected = train(model, optimizer, 2)
    other = tiny_model(3)
    other_optimizer = tiny_optimizer(other)
    restore(store, ref, other, [other_optimizer])
    assert not other_optimizer.state
    assert train(other, other_optimizer, 2) == expected
    # The plant: torch's helper makes the optimizer step, and its counters start at 1.
    third = tiny_model()
    third_optimizer = tiny_optimizer(third)
    get_optimizer_state_dict(third, third_optimizer)
    assert float(next(iter(third_optimizer.state.values()))["step"]) == 1.0
    assert train(third, third_optimizer, 2) != expected


def test_entries_that_the_new_scheduler_has_not_set_come_back(store: CheckpointStore, tmp_path: Path) -> None:
    model, optimizer = trained()
    ref = store.save(3, capture(model, [optimizer]), {}, {})
    # The plant: DCP by itself loads only what the target has, and says nothing.
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    planted = tiny_model(1)
    planted_optimizer = tiny_optimizer(planted, initial_lr=False)
    train(planted, planted_optimizer, 1)
    target = {"optimizer": get_optimizer_state_dict(planted, planted_optimizer)}
    dcp.load(target, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert "initial_lr" not in target["optimizer"]["param_groups"][0]
    other = tiny_model(1)
    other_optimizer = tiny_optimizer(other, initial_lr=False)
    notes = restore(store, ref, other, [other_optimizer]).notes
    assert [group["initial_lr"] for group in other_optimizer.param_groups] == [0.1, 0.01]
    assert [group["lr"].hex() for group in other_optimizer.param_groups] == [
        group["lr"].hex() for group in optimizer.param_groups
    ]
    assert len(notes) == 2


def test_state_keeps_its_own_type(store: CheckpointStore) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tiny_model(seed).bfloat16()
        return model, tiny_optimizer(model)

    model, optimizer = make(0)
    train(model, optimizer, 2)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 2**-20  # bf16 could not hold it
    ref = store.save(2, capture(model, [optimizer]), {}, {})
    other, other_optimizer = make(1)
    train(other, other_optimizer, 1)
    for state in other_optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float()
    restore(store, ref, other, [other_optimizer])
    assert same(snapshot(model, optimizer), snapshot(other, other_optimizer)) == []
    # The plant: load_state_dict casts to the parameters' type.
    planted_optimizer = make(1)[1]
    planted_optimizer.load_state_dict(optimizer.state_dict())
    assert next(iter(planted_optimizer.state.values()))["exp_avg"].dtype == torch.bfloat16


def test_two_optimizers_and_a_tensor_learning_rate(store: CheckpointStore) -> None:
    def make(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = tiny_model(seed)
        matrices = [layer.weight for layer in model.layers]
        rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
        rate = torch.tensor(0.01)
        return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=rate, foreach=False)]

    def go(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> list[str]:
        losses = []
        for step in range(steps):
            loss = model(torch.tensor([step, 1, 2])).pow(2).sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
        optimizers[1].param_groups[0]["lr"].mul_(0.5)
        return losses

    model, optimizers = make(0)
    go(model, optimizers, 2)
    ref = store.save(2, capture(model, optimizers), {}, {})
    other, other_optimizers = make(1)
    restore(store, ref, other, other_optimizers)
    assert float(other_optimizers[1].param_groups[0]["lr"]) == float(torch.tensor(0.01) * 0.5)
    assert go(other, other_optimizers, 3) == go(model, optimizers, 3)


def test_only_adapters_are_saved_and_restored(store: CheckpointStore) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tiny_model(0)  # the frozen weights come from elsewhere
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        nn.init.normal_(model.layers[1].weight.requires_grad_(True))
        return model, torch.optim.AdamW([model.layers[1].weight], lr=0.1)

    model, optimizer = make(1)
    train(model, optimizer, 2)
    ref = store.save(2, capture(model, [optimizer], trainable_only=True), {}, {})
    assert store.load_full_model(ref).keys() == {"layers.1.weight", "counter"}
    expected = train(model, optimizer, 2, 2)
    other, other_optimizer = make(2)
    restore(store, ref, other, [other_optimizer], trainable_only=True)
    assert train(other, other_optimizer, 2, 2) == expected


def test_names_are_those_of_the_bare_model() -> None:
    model = tiny_model()
    names = capture(model, [tiny_optimizer(model)])["model"].keys()
    assert names == Tiny().state_dict().keys()
    compiled = torch.compile(model, backend="eager")
    tree = capture(compiled, [tiny_optimizer(compiled)])
    assert tree["model"].keys() == names
    assert set(tree["optimizer"]["param_groups"][0]["params"]) == {"embed.weight", "layers.0.weight", "layers.1.weight"}


def test_a_restore_that_fails_changes_nothing(store: CheckpointStore) -> None:
    model, optimizer = trained()
    ref = store.save(3, capture(model, [optimizer]), {}, {})
    other = tiny_model(1)
    other.layers[1] = nn.Linear(6, 4)
    other_optimizer = tiny_optimizer(other)
    before = snapshot(other, other_optimizer)
    with pytest.raises(UserError, match=r"layers\.1\.bias"):
        restore(store, ref, other, [other_optimizer])
    assert same(before, snapshot(other, other_optimizer)) == [] and not other_optimizer.state
    grouped = tiny_model(1)
    with pytest.raises(UserError, match="param_groups"):
        restore(store, ref, grouped, [torch.optim.AdamW(grouped.parameters())])


def test_strange_optimizers_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="the model lacks"):
        capture(model, [torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)])
    twice = [tiny_optimizer(model), tiny_optimizer(model)]
    train(model, twice[0], 1)
    model(torch.tensor([1])).sum().backward()
    twice[1].step()
    with pytest.raises(ValueError, match="two optimizers hold"):
        capture(model, twice)


def test_eight_bit_optimizer_state(store: CheckpointStore) -> None:
    optim = pytest.importorskip("torchao.optim")

    class Wide(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.layer = nn.Linear(64, 64)  # below 4096 elements it keeps 32 bits

    def go(model: Wide, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
        losses = []
        for step in range(steps):
            loss = model.layer(torch.full((2, 64), 1.0 + step)).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()).hex())
        return losses

    with torch.compiler.set_stance("force_eager"):
        model, other = Wide(0), Wide(1)
        optimizer, other_optimizer = (optim.AdamW8bit(m.parameters(), lr=0.01) for m in (model, other))
        go(model, optimizer, 2)
        assert type(optimizer.state[model.layer.weight]["exp_avg"]).__name__ == "OptimState8bit"
        ref = store.save(2, capture(model, [optimizer]), {}, {})
        assert store.list()[0].parts["optimizer"] < 3 * 64 * 64  # bytes as stored, not as the type pretends
        restore(store, ref, other, [other_optimizer])
        assert go(other, other_optimizer, 2) == go(model, optimizer, 2)
