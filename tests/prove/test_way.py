"""What only the optimizer does wrong: every gradient of the first step is right, the weights go another way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import tiny
from headway.config.load import load_run
from headway.config.run import RunConfig
from headway.prove.comparison import Test
from headway.prove.judge import judge
from headway.prove.rebatch import documents_of
from headway.prove.trainee import Trainee
from headway.prove.trajectory import Trajectory, follow
from headway.prove.way import ways
from headway.train.data import prepare_sources
from headway.train.optim import Optimizers, build_optimizers

ROUNDING = 2.0**-8
"""Of bfloat16; in float32 every fault here is found by a factor of thousands."""


Fault = Callable[[nn.Module, Optimizers], None]


def left_out(*endings: str) -> Fault:
    """The optimizer never saw some tensors."""

    def plant(module: nn.Module, optimizers: Optimizers) -> None:
        lost = [id(p) for name, p in module.named_parameters() if name.endswith(endings)]
        assert lost
        for group in optimizers.items[0].param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in lost]

    return plant


def everything_decays(module: nn.Module, optimizers: Optimizers) -> None:
    """Norms and biases, too."""
    for group in optimizers.items[0].param_groups:
        group["weight_decay"] = 0.1


def half_the_rate(module: nn.Module, optimizers: Optimizers) -> None:
    """Norms and biases learn half as fast."""
    for number, group in enumerate(optimizers.items[0].param_groups):
        optimizers._base_lr[0][number] *= 1.0 if group["weight_decay"] else 0.5


FAULTS: dict[str, Fault] = {
    "all biases left out": left_out(".bias"),
    "the bias of q left out": left_out("q_proj.bias"),
    "one norm left out": left_out("post_attention_layernorm.weight"),
    "k left out": left_out("k_proj.weight"),
    "norms decay": everything_decays,
    "half the rate for norms": half_the_rate,
}


class World:
    """A and its second run, for many Bs: one trainee that starts anew for each."""

    def __init__(self, config: RunConfig, folder: Path, noise: float) -> None:
        self.noise, self.plan, self.trainee = noise, documents_of(config, 3, 1), Trainee(config, folder / "a")
        self.first = copy.deepcopy(self.trainee.module.state_dict())
        self.a = self.trained()
        self.trainee.reorder = 1
        self.twin = self.trained(lambda module, optimizers: self.trainee._shake(noise))
        self.trainee.reorder = 0

    def trained(self, plant: Fault = lambda module, optimizers: None) -> Trajectory:
        module, learner = self.trainee.module, self.trainee.run.learner
        module.load_state_dict(self.first)
        learner.optimizers = build_optimizers(module, self.trainee.config.optim)
        plant(module, learner.optimizers)
        return follow("", self.trainee, self.plan, lambda text: None)

    def failed(self, b: Trajectory) -> list[Test]:
        return judge(self.a, b, self.twin, rounding=self.noise).failed


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("way")
    made = tiny.run_file(folder, train={"steps": 50, "global_batch_sequences": 2, "precision": "bfloat16"})
    raw = yaml.safe_load(made.read_text())
    raw["model"]["config"] = tiny.config(model_type="qwen2", num_hidden_layers=1)
    made.write_text(yaml.safe_dump(raw))
    config = load_run(made).config
    prepare_sources(config, lambda text: None)
    found = World(config, folder, ROUNDING)
    yield found
    found.trainee.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_optimizer_does_wrong_is_found(world: World, fault: str) -> None:
    failed = world.failed(world.trained(FAULTS[fault]))
    assert any(test.name.endswith("way per tensor") and test.value > 2 * test.limit for test in failed), failed


def test_another_way_to_compute_the_same_updates_is_the_same_way(world: World) -> None:
    def eager(module: nn.Module, optimizers: Optimizers) -> None:
        world.trainee.run.learner.optimizers = build_optimizers(module, world.trainee.config.optim, "eager")

    assert not world.failed(world.trained(eager))


def way(vector: torch.Tensor) -> Trajectory:
    return Trajectory("", gradients={0: {"norm.weight": torch.ones(64)}}, update={"norm.weight": vector})


def test_where_chance_decides_what_moves_nothing_is_held_against_it() -> None:
    """A norm's weights under stochastic rounding: two of 64 elements made a step, others in each run."""
    steps = torch.eye(64).double()
    a, b, twin = steps[0] + steps[1], steps[2], steps[3] + steps[4]
    assert {test.name for test in ways(way(a), way(b), way(twin), 2.0**-23)} == {"way of the weights"}


def test_what_is_all_length_is_held_against_b_only_while_the_weights_are_the_same() -> None:
    """An honest float16 run was refused for 0.43 % of a layer's length at a later step, where A's own differs by 0.14 %
    in any direction: other weights may change a gradient along itself."""
    dice = torch.Generator().manual_seed(0)
    own = torch.randn(4096, generator=dice, dtype=torch.float64)
    across = torch.randn(4096, generator=dice, dtype=torch.float64)
    across -= own * (across @ own) / (own @ own)
    name = "layers.0.self_attn.q_proj.weight"

    def side(step: int, gradient: torch.Tensor) -> Trajectory:
        made = Trajectory("", [1.0] * 3, [1.0] * 3, {step: {name: gradient}}, {name: own}, 1.0, [1000] * 3, 1000)
        return made

    def longer(step: int, by: float) -> bool:
        twin = own + 0.0014 * across * own.norm() / across.norm()
        found = judge(side(step, own), side(step, own * (1 + by)), side(step, twin), rounding=2.0**-11)
        return any("length" in test.name and not test.passed for test in found.tests)

    assert not longer(2, 0.0043) and longer(0, 0.0043)
    assert longer(2, 0.03), "a factor that is no rounding is found at any step"
