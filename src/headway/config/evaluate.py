"""The run file's `eval` section."""

from __future__ import annotations

from pydantic import Field, model_validator

from headway.config.base import Section, fault, marks
from headway.config.data import Sources


class EvalConfig(Section):
    """Held-out loss, averaged by token. At most one of `data` and `holdout`."""

    every: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps between evaluations; null evaluates once, after the last step.",
    )
    at_start: bool = Field(
        default=False,
        description="Evaluate before the first step too, so that the first number is the model's that was loaded; "
        "off because it lengthens the start.",
    )
    data: Sources | None = Field(
        default=None,
        description="Where held-out documents come from, written like data.sources; null has none of its own.",
        json_schema_extra=marks(allowed="a list of paths or of {path, weight, format}, or null"),
    )
    holdout: int = Field(
        default=0,
        ge=0,
        description="Documents taken out of the training data for evaluation, the same ones for the same "
        "seed; 0 trains on all.",
        json_schema_extra=marks(identity=True),
    )
    batches: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of micro-batches per rank in one evaluation; null takes all documents.",
    )

    @model_validator(mode="after")
    def _has_documents(self) -> EvalConfig:
        if self.data is not None and self.holdout:
            raise fault("eval.holdout", "give at most one of eval.data and eval.holdout; both are given")
        if self.every is not None and not self.enabled:
            raise fault(
                "eval.every", "there is nothing to evaluate on; set eval.data (files) or eval.holdout (documents)"
            )
        if self.at_start and not self.enabled:
            raise fault(
                "eval.at_start", "there is nothing to evaluate on; set eval.data (files) or eval.holdout (documents)"
            )
        return self

    @property
    def enabled(self) -> bool:
        return self.data is not None or self.holdout > 0
