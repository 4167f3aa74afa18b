"""From the run file's model section to a module on its device, ready to be wrapped."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from headway.account.flops import LoraShape, Trainable
from headway.account.shape import ModelShape
from headway.config.model import LoraConfig
from headway.config.paths import refuse_missing
from headway.config.run import RunConfig
from headway.model.load import check_model_config, check_model_folder, load_model
from headway.model.lora import apply_lora


@dataclass(frozen=True)
class BuiltModel:
    """module: what trains (a PEFT model with LoRA). config and shape: of the plain model.

    base_digest: of the frozen base weights under LoRA, whose checkpoints hold adapters only; empty otherwise.
    """

    module: nn.Module
    config: PretrainedConfig
    shape: ModelShape
    trainable: Trainable
    base_digest: str = ""


def check_model_section(config: RunConfig) -> None:
    """Finds what is wrong with the section without reading or making weights: before hours of tokenising."""
    if config.model.tokenizer is not None:
        refuse_missing(config.model.tokenizer, "model.tokenizer")
    check_model_folder(config.model.path)
    if config.model.config is not None:
        check_model_config(config.model.config, trust_remote_code=config.model.trust_remote_code)


def build_model(config: RunConfig) -> BuiltModel:
    """Loads (or makes, from the seed) the model on the CPU. Raises UserError for whatever is wrong with the section."""
    model = load_model(
        path=config.model.path,
        config=config.model.config,
        dtype=config.model.dtype,
        attention=config.model.attention,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
    )
    shape = shape_of(model)
    plain_config = model.config
    trainable: Trainable = "full"
    module: nn.Module = model
    digest = ""
    if config.model.lora is not None:
        trainable = _lora_shape(model, config.model.lora)
        digest = weights_digest(model)
        module = apply_lora(model, config.model.lora, seed=config.seed)
    return BuiltModel(module, plain_config, shape, trainable, digest)


def shape_of(model: nn.Module) -> ModelShape:
    """Sizes of a plain model, exact from its config where that agrees with its parameters."""
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    lookups = {f"{name}.weight" for name, child in model.named_modules() if isinstance(child, nn.Embedding) and name}
    return ModelShape.of_model(model.config.to_dict(), parameters, lookups)  # type: ignore[operator, union-attr]


def weights_digest(model: nn.Module) -> str:
    """A digest of all parameters, at memory speed: per tensor, the sum of its 32-bit words and of their first half."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        words = parameter.detach().contiguous().view(torch.uint8).flatten()
        words = words[: len(words) - len(words) % 4].view(torch.int32)
        # The second sum sees values that moved.
        halves = words[: len(words) // 2].sum(dtype=torch.int64)
        found.update(f"{name} {tuple(parameter.shape)} {int(words.sum(dtype=torch.int64))} {int(halves)};".encode())
    return found.hexdigest()


def _lora_shape(model: nn.Module, lora: LoraConfig) -> LoraShape:
    targets = tuple(lora.targets) if isinstance(lora.targets, list) else tuple(_linear_names(model))
    return LoraShape(lora.rank, targets)


def _linear_names(model: nn.Module) -> list[str]:
    """Names of the linear layers that PEFT's ``all-linear`` means: all but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = [name for name, child in model.named_modules() if isinstance(child, nn.Linear) and child is not head]
    return sorted({name.rsplit(".", 1)[-1] for name in linear})


def use_deterministic_kernels() -> None:
    """Same bits every time: torch refuses an operation that has no deterministic kernel."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
