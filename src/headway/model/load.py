"""Models and tokenizers from local Hugging Face folders, or models with random weights from a config."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headway.account.errors import UserError
from headway.config.paths import refuse_missing
from headway.model import attention as headway_attention
from headway.model.forward import embedding_rows
from headway.model.terminal import bars_on_terminals_only

Attention = Literal["auto", "headway", "sdpa", "eager"]

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip


def load_tokenizer(path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder (or of a hub name, where the hub or its cache can be reached)."""
    refuse_missing(path, "model.tokenizer")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise UserError(f"model.tokenizer {path}: no tokenizer can be loaded ({_in_short(error)})") from error


def load_model(
    *,
    path: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = torch.float32,
    attention: Attention = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model on the CPU, in training mode, all parameters of type `dtype`.

    path:   a local folder with config.json and safetensors (or a hub name); weights as saved, none left random.
    config: path of a config.json, of its folder, or the same keys as a mapping with model_type; random weights that
            depend on `seed` alone (the caller's generators are left as they were).
    Exactly one of the two. Raises UserError for anything missing, unknown or incomplete.
    """
    if (path is None) == (config is None):
        raise UserError("give exactly one of model.path and model.config")
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind is None:
        raise UserError(f"model.dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    headway_attention.register()
    bars_on_terminals_only()
    if path is not None:
        model = _load_weights(path, kind, trust_remote_code)
    else:
        assert config is not None
        model = _random_weights(read_config(config, trust_remote_code=trust_remote_code), kind, seed, trust_remote_code)
    set_attention(model, attention)
    return model.train()


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The architecture from a config.json, its folder, a hub name, or inline keys with model_type."""
    if not isinstance(source, Mapping):
        refuse_missing(source, "model.config")
        try:
            return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except json.JSONDecodeError as error:
            raise UserError(f"model.config {source}: not JSON ({_in_short(error)})") from error
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            _check_known(_model_type_in(Path(source)), f"model.config {source}")
            raise UserError(f"model.config {source}: {_in_short(error)}") from error
    keys = dict(source)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UserError("model.config needs model_type, e.g. model_type: llama")
    _check_known(model_type, "model.config")
    try:
        return AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # each config class checks its keys with errors of its own kinds
        raise UserError(f"model.config ({model_type}): {_in_short(error)}") from error


def set_attention(model: PreTrainedModel, attention: Attention) -> str:
    """Choose the attention implementation; returns its name.

    `auto` is `headway` for models made for exchangeable attention, else transformers' own choice for the model (sdpa or
    eager). Asking for one that the model cannot run is a UserError, never a silent replacement.
    """
    chosen: str = attention
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if attention == "auto":
        if not _made_for_headway(model) or why_not_headway(model):
            if not (capped and model.config._attn_implementation == "sdpa"):
                return model.config._attn_implementation
            chosen = "eager"
        else:
            chosen = headway_attention.NAME
    if chosen == "sdpa" and capped:
        # Releases of transformers before 5.24 let it pass, and sdpa leaves the cap out without a word.
        raise UserError(
            f"model.attention sdpa: {type(model).__name__} does not support it, since it caps its scores "
            f"(attn_logit_softcapping {capped:g}); set model.attention=eager or auto"
        )
    if chosen == headway_attention.NAME and (reason := why_not_headway(model)):
        raise UserError(f"model.attention headway: {reason}; set model.attention to sdpa or eager")
    try:
        model.set_attn_implementation(chosen)
    except (ValueError, ImportError) as error:
        others = "auto" if chosen == "eager" else "eager or auto"
        raise UserError(f"model.attention {chosen}: {_in_short(error)}; set model.attention={others}") from error
    if model.config._attn_implementation != chosen:
        raise UserError(f"model.attention {chosen}: {type(model).__name__} cannot change its attention; use auto")
    return chosen


def why_not_headway(model: PreTrainedModel) -> str | None:
    """Why this model cannot run the `headway` attention, in words, or None."""
    # Private, and the only word on whether the class calls transformers' attention interface at all.
    if not getattr(type(model), "_can_set_attn_implementation", lambda: True)():
        return f"{type(model).__name__} computes its attention itself instead of through transformers' interface"
    text = model.config.get_text_config()
    if getattr(text, "attention_chunk_size", None) or "chunked_attention" in _layer_types(model):
        return f"{type(model).__name__} attends in chunks, which only transformers' masks express"
    return None


def _made_for_headway(model: PreTrainedModel) -> bool:
    """Whether the class promises to hand keyword arguments to its attention, and is attention throughout.

    Recurrent and convolutional layers ignore the document table; in a rectangular batch each of their rows must stay a
    row, which `headway` does not keep.
    """
    attention_only = _layer_types(model) <= {"full_attention", "sliding_attention", "attention"}
    return attention_only and getattr(model, "_supports_attention_backend", False)


def _layer_types(model: PreTrainedModel) -> set[str]:
    text = model.config.get_text_config()
    return {kind for key in ("layer_types", "layers_block_type") for kind in getattr(text, key, None) or ()}


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """UserError when the tokenizer can produce ids that the model has no embedding for."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    rows = embedding_rows(model)
    if highest >= rows:
        raise UserError(
            f"the tokenizer's highest token id is {highest}, but the model embeds only ids 0..{rows - 1}; "
            "use the model's own tokenizer, or enlarge the model's vocab_size"
        )


def check_model_folder(path: str | os.PathLike[str] | None) -> None:
    """UserError for a model folder that is missing or has no weights; before hours of tokenising rather than after."""
    if path is None:
        return
    refuse_missing(path, "model.path")
    if Path(path).is_dir():
        _check_weights(Path(path))


def check_model_config(source: str | os.PathLike[str] | Mapping[str, Any], *, trust_remote_code: bool = False) -> None:
    """UserError for a config that no model can be made of; without making its weights, before hours of tokenising."""
    config = read_config(source, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        _random_weights(config, torch.float32, 0, trust_remote_code)


def _load_weights(path: str | os.PathLike[str], dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    check_model_folder(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        model, info = loaded
    except Exception as error:  # transformers raises a dozen kinds for an unusable folder
        if Path(path).is_dir():
            _check_known(_model_type_in(Path(path)), f"model.path {path}")
        raise UserError(f"model.path {path}: {_in_short(error)}") from error
    lost = sorted(info["missing_keys"]) + sorted(str(key) for key in info.get("mismatched_keys") or ())
    if lost:
        # transformers fills these with random numbers and goes on.
        raise UserError(
            f"model.path {path}: {len(lost)} of the model's weights are missing or have another shape, e.g. {lost[0]}"
        )
    return model


@contextmanager
def seeded_on_host(seed: int) -> Iterator[None]:
    """The host's generator begins at `seed`, and is afterwards as it was. torch's own `fork_rng` and `manual_seed` look
    at every GPU's too, which makes a context on each: where nothing is computed on one, memory for nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _random_weights(
    config: PretrainedConfig, dtype: torch.dtype, seed: int, trust_remote_code: bool
) -> PreTrainedModel:
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not trust_remote_code:
        raise UserError(f"model.config ({config.model_type}): transformers has no causal language model of this type")
    with seeded_on_host(seed):
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
            raise UserError(
                f"model.config ({config.model_type}): no model can be made of it ({_in_short(error)})"
            ) from error


def _check_weights(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path {folder}: no config.json in it; give the folder of a Hugging Face model")
    if not any(folder.glob("*.safetensors")):
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f" (found {others[0]})" if others else ""
        raise UserError(f"model.path {folder}: no *.safetensors in it{found}; convert the weights to safetensors")


def _model_type_in(path: Path) -> str | None:
    file = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_known(model_type: str | None, where: str) -> None:
    if model_type is None or model_type in CONFIG_MAPPING:
        return
    near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
    hint = f"; the nearest is {near[0]}" if near else ""
    raise UserError(f"{where}: transformers knows no model_type {model_type!r}{hint}")


def _in_short(error: BaseException) -> str:
    """The first sentence of a library's message, on one line."""
    text = " ".join(str(error).split()).split(". ")[0]
    if not text or isinstance(error, KeyError):  # whose message is the bare key
        return f"{type(error).__name__} {text}".rstrip()
    return text[:240]
