"""The run file's `model` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headway.config.base import Section, fault, marks


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021); the base weights stay frozen."""

    rank: int = Field(
        default=16,
        ge=1,
        description="Rank of the adapters; 16 is the common middle of 8 to 64.",
        json_schema_extra=marks(identity=True),
    )
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="Scale: adapter outputs are multiplied by alpha / rank; twice the rank is customary.",
        json_schema_extra=marks(identity=True),
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout on the adapters' input, a probability; 0 because it costs memory and time.",
        json_schema_extra=marks(identity=True),
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="Modules that get an adapter: every linear layer except the output head, or a list of "
        "name endings; all layers together match full fine-tuning best.",
        json_schema_extra=marks(
            identity=True, allowed="all-linear, or a list of module names such as [q_proj, v_proj]"
        ),
    )


class ModelConfig(Section):
    """Which model is trained, and how its layers run. Exactly one of `path` and `config`."""

    path: str | None = Field(
        default=None,
        description="Folder (or hub name) of a Hugging Face causal language model whose weights training starts from.",
        json_schema_extra=marks(identity=True, path="model", allowed="a folder, a hub name or null"),
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="Architecture to start with random weights: a config.json, its folder, or the same keys "
        "written inline.",
        json_schema_extra=marks(
            identity=True,
            path="model",
            allowed="a path, a mapping with model_type (keys of a Hugging Face config), or null",
        ),
    )
    tokenizer: str | None = Field(
        default_factory=lambda data: data.get("path"),
        description="Folder (or hub name) of the tokenizer; by default the model's own, saved beside the "
        "trained weights.",
        json_schema_extra=marks(
            identity=True, path="model", allowed="a folder, a hub name or null", derived="model.path"
        ),
    )
    attention: Literal["auto", "headway", "sdpa", "eager"] = Field(
        default="auto",
        description="Attention implementation: `headway` computes each packed document on its own, `sdpa` "
        "and `eager` are transformers' (for comparison); `auto` is `headway`.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the stored parameters that the optimizer updates; float32 because bfloat16 "
        "rounds away updates smaller than about 0.4 % of a weight.",
        json_schema_extra=marks(identity=True),
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="Train low-rank adapters instead of all weights; null trains every weight.",
        json_schema_extra=marks(identity=True),
    )
    recompute: Literal["auto", "none", "selective", "full"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Activation recompute: `none`, `selective` (keeps matrix products and attention), a number n (also "
        "the first n layers wholly) or `full` (keeps layer inputs; a third more compute); `auto` takes the least that "
        "fits, more when memory runs out.",
        json_schema_extra=marks(allowed="auto, none, selective, full, or a number of layers"),
    )
    offload: Literal["none", "activations", "optimizer"] = Field(
        default="none",
        description="What may move to host memory: `activations` adds a level below full recompute, `optimizer` also "
        "moves weights, gradients and optimizer state (needs parallel.fsdp of 2 or more); none because the link is "
        "slow, as the printed cost shows.",
    )
    fuse: Literal["none", "auto"] = Field(
        default="none",
        description="Kernels between matrix products, and head and loss as one: `auto` checks every candidate on this "
        "run's shapes and takes the fastest that is right (up to 15 s, then remembered); none because it is the plain "
        "reference.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model or tokenizer; off because it can do anything.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            given = "neither is given" if self.path is None else "both are given"
            raise fault(
                "model.path",
                f"give exactly one of model.path (start from its weights) and model.config (random weights); {given}",
            )
        if isinstance(self.config, dict) and not isinstance(self.config.get("model_type"), str):
            raise fault("model.config", "an inline model.config needs model_type, e.g. model_type: llama")
        if self.lora is not None and isinstance(self.lora.targets, list) and not self.lora.targets:
            raise fault("model.lora.targets", "the list of modules is empty, so nothing would be trained")
        return self
