"""Weights as a Hugging Face folder: safetensors that `AutoModelForCausalLM.from_pretrained` loads, tokenizer beside."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from headway.account.errors import UserError
from headway.model.forward import inner_model
from headway.model.terminal import bars_on_terminals_only


def save_model(
    state: Mapping[str, Tensor],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Write model, tokenizer and generation settings to a new folder, published by one rename.

    state: full (unsharded) state dict on the CPU under the plain model's names; a tied head may be present or absent.
    Floating weights are rounded to `dtype`. Raises UserError when `out_dir` exists, when the disk is full (nothing is
    left behind), or when the state does not fit the config (missing, unexpected or misshapen weights are named).
    """
    bars_on_terminals_only()
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    fill_skeleton(model, {name: _cast(tensor, dtype) for name, tensor in state.items()})
    if generation_config is not None:
        model.generation_config = generation_config
    with new_folder(out_dir) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))


def fill_skeleton(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put the tensors themselves (not copies) into a model made on the meta device.

    UserError when one is missing, unexpected or of another shape.
    """
    try:
        unexpected = model.load_state_dict(dict(state), strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise UserError(f"the weights do not fit the model: {str(error).splitlines()[-1].strip()}") from error
    inner_model(model).tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    for names, what in ((missing, "lack"), (unexpected, "hold, unlike the model,")):
        if names:
            raise UserError(f"the weights {what} {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""))


@contextmanager
def new_folder(out_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write into that appears as `out_dir` only when the block has ended without an error."""
    target = Path(out_dir)
    if target.exists():
        raise UserError(f"{target} exists already; give another folder or remove it")
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        yield partial
        partial.chmod(0o755)  # mkdtemp's folder is private
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # safetensors writes files that only their owner can read
            _flush(file)
        partial.rename(target)
        _flush(target.parent)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    # Without it a power cut can leave the final name with empty files behind it.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
