"""Low-rank adapters through PEFT (LoRA, arXiv:2106.09685): the base is frozen, only the adapters train."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from headway.account.errors import UserError
from headway.config.model import LoraConfig
from headway.model.export import fill_skeleton, new_folder
from headway.model.load import seeded_on_host


def apply_lora(model: PreTrainedModel, lora: LoraConfig, *, seed: int = 0) -> PeftModel:
    """The model with adapters on its target modules, in place: everything else is frozen.

    The adapters start as a change of exactly zero (B = 0) and depend on `seed` alone; under a bfloat16 or float16 model
    they are float32, because their updates are small. Raises UserError when no module has such a name.
    """
    with seeded_on_host(seed):
        try:
            adapted = get_peft_model(model, _peft_config(lora))
        except ValueError as error:
            raise UserError(f"model.lora.targets {lora.targets}: {str(error).splitlines()[0]}") from error
    return adapted.train(model.training)


def lora_state(model: PeftModel, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapters' tensors under PEFT's file names, from the model or from its full state dict (e.g. gathered)."""
    return get_peft_model_state_dict(model, state_dict=state)


def save_adapter(model: PeftModel, out_dir: str | os.PathLike[str], state: dict[str, Tensor] | None = None) -> None:
    """A folder that `PeftModel.from_pretrained` loads; published by one rename, refused where something exists."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in lora_state(model, state).items()}
    with new_folder(out_dir) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = model.peft_config["default"]
        trained, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(str(folder))
        finally:
            config.inference_mode = trained


def merge_lora(state: Mapping[str, Tensor], config: PretrainedConfig, lora: LoraConfig) -> dict[str, Tensor]:
    """State dict of the plain model with the adapters added into its weights: W + alpha / rank * B A.

    state: the adapted model's full state dict on the CPU; its tensors are not changed. Raises UserError for weights
    that are not finite after merging.
    """
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=_base_dtype(state))
        adapted = get_peft_model(base, _peft_config(lora))
    fill_skeleton(adapted, state)
    try:
        # `safe_merge` adds into a copy: without it the caller's tensors (a live model's, perhaps) would change.
        return adapted.merge_and_unload(safe_merge=True).state_dict()
    except ValueError as error:
        raise UserError(f"the adapters cannot be merged: {str(error).splitlines()[0]}") from error


def _base_dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    return next(tensor.dtype for name, tensor in state.items() if "lora_" not in name and tensor.is_floating_point())


def _peft_config(lora: LoraConfig) -> PeftLoraConfig:
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # any number works
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
