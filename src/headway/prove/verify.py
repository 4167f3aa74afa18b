"""`headway verify A B`: one after the other on the same documents, from the same weights, then the verdict."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.account.errors import UserError
from headway.config.diff import Change, config_diff
from headway.config.run import RunConfig
from headway.parallel.device import choose_device
from headway.prove.coverage import (
    of_meaning,
    other_step,
    refuse_other_tensors,
    refuse_tensors_apart,
    shapes_of,
    uncompared,
)
from headway.prove.judge import Verdict, judge
from headway.prove.rebatch import Steps, documents_of, refuse_other_documents, tokens_per_step
from headway.prove.trainee import Trainee
from headway.prove.trajectory import Trajectory, follow
from headway.train.data import prepare_sources

#: One unit of rounding, relative, of what matrix products and stored weights are rounded to: 2^-p with p bits of
#: significand, the hidden one counted (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.1).
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8": 2.0**-4}

Say = Callable[[str], None]
MakeTrainee = Callable[..., Trainee]


@dataclass(frozen=True)
class Verified:
    """A comparison: the verdict, both trajectories and A's twin, and what differs between the configurations.

    unseen: the held-out loss is over documents that the steps did not train on. own_steps: real tokens of a mean step
    of A's and of B's own global batch; both made A's steps here.
    uncompared: those differences that no step here depends on; open: those of them that make another training of it.
    other_step: how B's own steps are larger or smaller than A's, in words; empty where they are not.
    """

    verdict: Verdict
    a: Trajectory
    b: Trajectory
    twin: Trajectory
    differences: tuple[Change, ...]
    steps: int
    unseen: bool = True
    own_steps: tuple[float, float] = (0.0, 0.0)
    uncompared: tuple[Change, ...] = ()
    open: tuple[Change, ...] = ()
    other_step: str = ""

    @property
    def exit_code(self) -> int:
        """0: the same training as far as compared; 1: not; 3: the same from the same documents, in other steps."""
        return 1 if not self.verdict.same else 3 if self.other_step else 0


def verify(
    a: RunConfig,
    b: RunConfig,
    scratch: Path,
    *,
    steps: int = 10,
    held_out: int = 2,
    say: Say,
    make_a: MakeTrainee = Trainee,
    make_b: MakeTrainee = Trainee,
    seed_band: bool = False,
) -> Verified:
    """Trains A, A's twin and B for `steps` optimizer steps of A's documents each, and judges.

    Everything runs in this process on one device, at the full learning rate (the schedule is not compared), without
    dropout. make_a, make_b: for tests, which plant faults.

    Raises:
        UserError: the two do not train the same tensors on the same documents, or one of them cannot be built.
    """
    refuse_other_documents(a, b)
    refuse_measured_precision("verify", a, b)
    refuse_other_tensors(a, b)
    prepare_sources(a, say)
    plan = documents_of(a, steps, held_out)
    _refuse_short_packs(b, plan)
    trajectory_a = _follow("A", lambda: make_a(a, scratch / "a"), plan, say)
    twin_config, noise = _coarser(a, b)
    twin = _follow("A again", lambda: make_a(twin_config, scratch / "twin", noise=noise, reorder=1), plan, say)
    trajectory_b = _follow("B", lambda: make_b(b, scratch / "b"), plan, say, trajectory_a.shapes)
    spread = _seed_spread(a, scratch, steps, trajectory_a, say) if seed_band else None
    verdict = judge(trajectory_a, trajectory_b, twin, spread, rounding=min(noise, ROUNDING["bfloat16"]))
    own = tokens_per_step(a, plan.view), tokens_per_step(b, plan.view)
    beside = uncompared(a, b)
    return Verified(
        verdict,
        trajectory_a,
        trajectory_b,
        twin,
        tuple(config_diff(a, b)),
        steps,
        plan.unseen,
        own,
        tuple(beside),
        tuple(of_meaning(beside, a, b)),
        other_step(a, b, own),
    )


def refuse_measured_precision(command: str, *configs: RunConfig) -> None:
    """Raises UserError where what the products run in is only known when the run starts."""
    if any(config.train.precision == "float8_auto" for config in configs):
        raise UserError(f"{command}: train.precision float8_auto is decided by measuring; write float8 or bfloat16")


def reference_of(config: RunConfig) -> RunConfig:
    """The obvious path of the same training: nothing fused, nothing compiled, float32, no recompute."""
    values = config.model_dump()
    values["preset"] = "none"
    values["train"].update(precision="float32", compile=False)
    values["model"].update(recompute="none", dtype="float32")
    for section in ("train", "model"):
        if "fuse" in values[section]:
            values[section]["fuse"] = "none"
    return RunConfig.model_validate(values)


def compute_dtype(config: RunConfig) -> str:
    """The type that the configuration's matrix products run in, `auto` resolved."""
    if config.train.precision == "auto":
        return "bfloat16" if choose_device(config.device).type == "cuda" else "float32"
    return config.train.precision


def _coarser(a: RunConfig, b: RunConfig) -> tuple[RunConfig, float]:
    """A in the coarser arithmetic of the two, and one unit of rounding there: what A's second run is made with."""
    computed = max((compute_dtype(config) for config in (a, b)), key=lambda kind: ROUNDING[kind])
    stored = max((config.model.dtype for config in (a, b)), key=lambda kind: ROUNDING[kind])
    values = a.model_dump()
    values["train"]["precision"], values["model"]["dtype"] = computed, stored
    return RunConfig.model_validate(values), max(ROUNDING[computed], ROUNDING[stored])


def _refuse_short_packs(config: RunConfig, plan: Steps) -> None:
    if config.data.packed and config.data.slots < plan.view.longest:
        raise UserError(f"verify: data.slots = {config.data.slots} does not hold the longest document")


def _follow(
    name: str, make: Callable[[], Trainee], plan: Steps, say: Say, like: Mapping[str, tuple[int, ...]] | None = None
) -> Trajectory:
    """like: names and shapes of A's trained tensors, which the built model has, too."""
    trainee = make()
    try:
        if like is not None:
            refuse_tensors_apart(like, shapes_of(trainee.module))
        return follow(name, trainee, plan, say)
    finally:
        trainee.close()
        del trainee
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _seed_spread(config: RunConfig, scratch: Path, steps: int, of: Trajectory, say: Say) -> float:
    """How far the mean loss moves with another seed, that is with other documents in the same steps."""
    other = config.model_copy(update={"seed": config.seed + 1})
    found = _follow("A, other seed", lambda: Trainee(other, scratch / "seed"), documents_of(other, steps, 0), say)
    mean = sum(of.losses) / len(of.losses)
    return abs(sum(found.losses) / len(found.losses) - mean) / mean
