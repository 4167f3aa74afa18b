"""`ModelShape`: the exact sizes of a language model, from its Hugging Face config or its real matrices. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headway.account import measured
from headway.account.errors import UserError
from headway.account.families import build
from headway.account.family_table import FAMILIES
from headway.account.layers import Attention, Layer, Weight

__all__ = ["Attention", "Layer", "ModelShape", "Weight"]


@dataclass(frozen=True, eq=True)
class ModelShape:
    """One causal language model in numbers.

    `parameters` equals transformers' `model.num_parameters()` (a tied head counted once; multi-token-prediction layers
    only where the model class holds them, which for DeepSeek-V3 and GLM-4.5 it does not: `mtp_layers` says how many
    the checkpoint has). `matmul_parameters` are the weights tokens are multiplied with: everything 2-D except the
    input and position embeddings, and the output head always, tied or not.
    """

    model_type: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool
    embedding_parameters: int  # input embedding and learned positions: looked up, never multiplied
    head: Weight
    outer: tuple[Weight, ...] = ()  # matrices outside the layers, head excluded
    vectors: int = 0  # outside the layers: norms, biases, and (measured) towers that see no text
    mtp_layers: int = 0
    source: str = "config"
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Exact shape from the content of `config.json` (or `model.config.to_dict()`).

        A multimodal wrapper is read through its `text_config`; vision and audio towers are not counted (noted).
        Raises UserError for an unsupported model type, and for missing or impossible keys, naming them.
        """
        text, notes = _text_config(config)
        built = build(text, FAMILIES)
        return cls(
            model_type=str(text["model_type"]),
            hidden=built.hidden,
            vocab=built.vocab,
            layers=_share_equal(built.layers),
            tied=built.tied,
            embedding_parameters=built.embedding,
            head=Weight("lm_head", built.head_inputs, built.vocab, "outer"),
            outer=built.outer,
            vectors=built.vectors,
            mtp_layers=built.mtp_layers,
            notes=notes,
        )

    @classmethod
    def measured(
        cls,
        config: Mapping[str, Any],
        parameters: Mapping[str, Sequence[int]],
        embeddings: Collection[str] | None = None,
    ) -> ModelShape:
        """Shape of any model from its real parameters: `{name: p.shape for name, p in model.named_parameters()}`.

        Every matrix counts as it is; attention dimensions and windows come from the config's common keys. `embeddings`
        are the names of lookup tables (parameters of `nn.Embedding`), guessed from their names when not given.
        Raises UserError when the config lacks its sizes. Give the model *before* LoRA wraps it.
        """
        text, notes = _text_config(config)
        found = measured.measure(text, parameters, embeddings, wrapped=text is not config)
        assert found.head is not None
        return cls(
            model_type=str(text.get("model_type", "unknown")),
            hidden=found.hidden,
            vocab=found.vocab,
            layers=_share_equal(found.layers),
            tied=found.tied,
            embedding_parameters=found.embedding,
            head=found.head,
            outer=tuple(found.outer),
            vectors=found.vectors,
            source="parameters",
            notes=(*notes, *found.notes),
        )

    @classmethod
    def of_model(
        cls,
        config: Mapping[str, Any],
        parameters: Mapping[str, Sequence[int]],
        embeddings: Collection[str] | None = None,
    ) -> ModelShape:
        """The config's exact shape where it agrees with the real parameters, else the measured one (`source` says)."""
        total = measured.count(parameters)
        try:
            shape = cls.from_config(config)
        except UserError:
            return cls.measured(config, parameters, embeddings)
        return shape if shape.parameters == total else cls.measured(config, parameters, embeddings)

    @cached_property
    def parameters(self) -> int:
        """All parameters, as `model.num_parameters()` counts them."""
        inside = sum(layer.parameters for layer in self.layers) + sum(weight.parameters for weight in self.outer)
        return self.embedding_parameters + inside + self.vectors + (0 if self.tied else self.head.parameters)

    @cached_property
    def matmul_parameters(self) -> int:
        """Matrix weights without the input embedding; all experts; the head even if tied."""
        inside = sum(layer.matmul_parameters for layer in self.layers)
        return inside + sum(weight.parameters for weight in self.outer) + self.head.parameters

    @cached_property
    def active_matmul_parameters(self) -> int:
        """Of `matmul_parameters`, those one token is multiplied with: the router's top-k and the shared experts."""
        inside = sum(layer.active_matmul_parameters for layer in self.layers)
        return inside + sum(weight.active_parameters for weight in self.outer) + self.head.parameters

    @cached_property
    def attention_kinds(self) -> tuple[tuple[Attention, int], ...]:
        """Distinct attentions and how many layers have each."""
        return tuple(Counter(layer.attention for layer in self.layers if layer.attention is not None).items())

    @cached_property
    def _hash(self) -> int:
        return hash((self.model_type, self.hidden, self.vocab, self.parameters, len(self.layers)))

    def __hash__(self) -> int:  # a hundred layers must not be hashed on every step
        return self._hash


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config, ()
    text = dict(inner)
    if "tie_word_embeddings" not in text and config.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return text, (f"text part of {config.get('model_type')!r} only; other towers are not counted",)


def _share_equal(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Equal layers become one object, so that comparing and counting them is quick."""
    seen: dict[Layer, Layer] = {}
    return tuple(seen.setdefault(layer, layer) for layer in layers)
