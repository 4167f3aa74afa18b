"""The run file's `optim` and `schedule` sections."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from headway.config.base import Section, fault, marks


class OptimConfig(Section):
    """How the weights are updated."""

    name: Literal["adamw", "muon", "adamw8bit"] = Field(
        default="adamw",
        description="Optimizer: AdamW; Muon for the layers' matrices with AdamW for the rest; or AdamW with "
        "8-bit state (needs torchao); adamw because every recipe is tuned for it.",
        json_schema_extra=marks(identity=True),
    )
    lr: float = Field(
        gt=0,
        description="Peak learning rate; no default because none fits all: about 2e-5 for full fine-tuning, "
        "2e-4 for LoRA, 3e-4 for pre-training.",
        json_schema_extra=marks(identity=True),
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95),
        description="AdamW's decay rates of the running mean and of the running square; 0.95 is the custom "
        "for language models, whose gradients spike.",
        json_schema_extra=marks(identity=True, allowed="two numbers in [0, 1), e.g. [0.9, 0.95]"),
    )
    eps: float = Field(
        default=1e-8,
        gt=0,
        description="AdamW's term against division by zero; torch's default.",
        json_schema_extra=marks(identity=True),
    )
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Decoupled weight decay of matrices (never of norms and biases), scaled by the learning "
        "rate; 0.1 is the custom for language models.",
        json_schema_extra=marks(identity=True),
    )
    clip_norm: float | None = Field(
        default=1.0,
        gt=0,
        description="Largest global gradient norm, above which gradients are scaled down; 1 is the custom, "
        "null never clips.",
        json_schema_extra=marks(identity=True),
    )
    muon_lr: float = Field(
        default_factory=lambda data: data["lr"],
        gt=0,
        description="Muon's peak learning rate for the layers' matrices, scaled so that an update is as "
        "large as AdamW's at the same rate (Moonlight, Liu et al. 2025).",
        json_schema_extra=marks(identity=True, derived="optim.lr"),
    )
    momentum: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="Muon's Nesterov momentum; torch's default.",
        json_schema_extra=marks(identity=True),
    )


def _steps_or_fraction(value: Any) -> Any:
    """Whole numbers are steps, numbers below one a fraction; 1.0 could be meant either way."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("neither a number of steps nor a fraction")
    if isinstance(value, float):
        if value == 1.0:
            raise ValueError("1.0 could be one step (write 1) or all of the training (not possible)")
        if value > 1 and value.is_integer():
            return int(value)
        if value > 1:
            raise ValueError("not a whole number of steps")
    if value < 0 or value != value:
        raise ValueError("negative or not a number")
    return value


StepsOrFraction = Annotated[int | float, BeforeValidator(_steps_or_fraction)]
_ALLOWED = "a whole number of steps, or a fraction of the training below 1"


class ScheduleConfig(Section):
    """The learning rate over the training, as a multiple of its peak."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine",
        description="Shape after warm-up: cosine or linear decay to the end, wsd (stable, then linear decay "
        "over `decay`), or constant; cosine is the most used.",
        json_schema_extra=marks(identity=True),
    )
    warmup: StepsOrFraction = Field(
        default=0.03,
        description="Linear rise from zero to the peak, in steps or as a fraction of the training; 3 % "
        "spares the first steps, whose optimizer state knows nothing yet.",
        json_schema_extra=marks(identity=True, allowed=_ALLOWED),
    )
    decay: StepsOrFraction = Field(
        default=0.2,
        description="Final decay of wsd, in steps or as a fraction of the training; 10 to 20 % reaches "
        "cosine's loss (Hägele et al. 2024).",
        json_schema_extra=marks(identity=True, allowed=_ALLOWED),
    )
    min_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Learning rate at the end, as a share of the peak; 0 because decaying all the way gives "
        "the lowest final loss, 0.1 is common when training will go on.",
        json_schema_extra=marks(identity=True),
    )

    @model_validator(mode="after")
    def _fractions_fit(self) -> ScheduleConfig:
        fractions = [_exact(part) for part in (self.warmup, self.decay) if isinstance(part, float)]
        if self.kind == "wsd" and sum(fractions) > 1:
            raise fault("schedule.decay", f"warmup {self.warmup} and decay {self.decay} are together more than 1")
        return self

    def warmup_steps(self, total: int) -> int:
        """Warm-up in steps, in a training of `total` steps. A fraction is rounded up, but leaves one step."""
        if isinstance(self.warmup, int):
            return self.warmup
        return min(math.ceil(_exact(self.warmup) * total), total - 1)

    def decay_steps(self, total: int) -> int:
        """wsd's decay in steps, in a training of `total` steps. A fraction is rounded down, but to one at least."""
        if isinstance(self.decay, int):
            return self.decay
        return max(math.floor(_exact(self.decay) * total), 1 if self.decay else 0)

    def misfit(self, total: int) -> tuple[str, str] | None:
        """(key, what is wrong) when warm-up and decay do not fit into `total` steps, else None."""
        warmup, decay = self.warmup_steps(total), self.decay_steps(total)
        if warmup >= total:
            return "schedule.warmup", (
                f"{warmup} steps of warm-up leave no step at the full rate in a training of {total} steps; "
                f"lower schedule.warmup or train longer"
            )
        if self.kind == "wsd" and warmup + decay > total:
            return "schedule.decay", (
                f"{warmup} steps of warm-up and {decay} of decay do not fit into a training of {total} steps; "
                f"lower schedule.decay or train longer"
            )
        return None


def _exact(fraction: float) -> Fraction:
    # As it was written: 0.07 * 100 is 7.000000000000001 in floating point, and would be rounded up to 8.
    return Fraction(repr(fraction))
