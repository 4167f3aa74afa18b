"""The run file's `train` section: how long, how much per step, in which precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.config.base import Section, fault, marks

USUAL_SENSITIVE = ("*norm*", "*router*", "*.gate", "lm_head")
"""Many models lack some of these: nothing is said of it."""


class LossConfig(Section):
    """Terms beside the cross-entropy of the trained tokens."""

    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the squared log-sum-exp of the logits (PaLM, Chowdhery et al. 2022; often "
        "1e-4); 0 because fine-tuning seldom needs it.",
        json_schema_extra=marks(identity=True),
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the target probability spread evenly over the vocabulary; 0 is plain cross-entropy.",
        json_schema_extra=marks(identity=True),
    )


class TrainConfig(Section):
    """Exactly one of `steps`, `epochs`, `tokens`; at most one `global_batch_*`."""

    steps: int | None = Field(
        default=None,
        ge=1,
        description="Length of the training in optimizer steps.",
        json_schema_extra=marks(identity=True),
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=10_000,
        description="Length of the training in passes over the data; fractions are allowed.",
        json_schema_extra=marks(identity=True),
    )
    tokens: int | None = Field(
        default=None,
        ge=1,
        description="Length of the training in real tokens (padding not counted).",
        json_schema_extra=marks(identity=True),
    )
    global_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Size of an optimizer step over all ranks in token slots, a multiple of data.slots (of "
        "data.seq_len when pack is none).",
        json_schema_extra=marks(identity=True),
    )
    global_batch_sequences: int | None = Field(
        default=None,
        ge=1,
        description="Size of an optimizer step over all ranks in packs (in rows when pack is none); with "
        "neither size given, one micro-batch per data-parallel rank.",
        json_schema_extra=marks(identity=True),
    )
    loss: LossConfig = Field(
        default_factory=LossConfig,
        description="Additional terms of the loss.",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16", "float8", "float8_auto"] = Field(
        default="auto",
        description="Type that matrix products run in; `auto` is bfloat16 on CUDA and float32 on CPU, where each is "
        "the fastest. `float16` scales the loss, `float8` is torchao's for the layers' linear parts, `float8_auto` "
        "takes it where a measured layer is 1.1 times as fast.",
        json_schema_extra=marks(identity=True),
    )
    sensitive: list[str] = Field(
        default=[*USUAL_SENSITIVE],
        description="Modules kept in float32 and out of float8, by name pattern; of the head only the loss is float32, "
        "its product runs in the compute type.",
        json_schema_extra=marks(identity=True, allowed="a list of name patterns, e.g. [*norm*, *.mlp.down_proj]"),
    )
    compile: bool | Literal["auto"] = Field(
        default=False,
        description="Compile the model's layers with torch.compile; `auto` measures one layer both ways and compiles "
        "where the run is long enough to win the time back; off because the first step then takes up to minutes.",
        json_schema_extra=marks(allowed="true, false or auto"),
    )

    @model_validator(mode="after")
    def _one_length_one_size(self) -> TrainConfig:
        lengths = [name for name in ("steps", "epochs", "tokens") if getattr(self, name) is not None]
        if len(lengths) != 1:
            given = "none is given" if not lengths else "given: " + ", ".join(f"train.{name}" for name in lengths)
            key = "train.steps" if not lengths else f"train.{lengths[-1]}"
            raise fault(key, f"give exactly one of train.steps, train.epochs and train.tokens; {given}")
        if self.global_batch_tokens is not None and self.global_batch_sequences is not None:
            raise fault(
                "train.global_batch_sequences",
                "give at most one of train.global_batch_tokens and train.global_batch_sequences; both are given",
            )
        return self
