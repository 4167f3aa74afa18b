"""A llama-family GGUF file as a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.account.errors import UserError
from headway.model.export import save_model
from headway.model.terminal import bars_on_terminals_only


def convert_gguf(gguf_path: str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> None:
    """Write model (dequantised, float32), tokenizer and chat template of a GGUF file as a loadable folder.

    Needs the `gguf` package. Raises UserError for a missing or unreadable file and for one without a chat template.
    """
    file = Path(gguf_path)
    if not file.is_file():
        raise UserError(f"{file}: no such GGUF file")
    bars_on_terminals_only()
    try:
        with _parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # the reader raises whatever its parsing hits
        raise UserError(f"{file} cannot be read as GGUF: {type(error).__name__}: {error}".splitlines()[0]) from error
    if not tokenizer.chat_template:
        raise UserError(f"{file} brings no chat template, so chats cannot be prepared for its model")
    config = model.config
    for role in ("bos", "eos", "pad", "unk"):
        # Some transformers releases build the tokenizer with another end token than the file names.
        token = getattr(config, f"{role}_token_id", None)
        if token is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token))
    if hasattr(config, "quantization_config"):
        # The weights are written dequantised; with this key a loader would look for the GGUF file again.
        del config.quantization_config
    # A loaded GGUF model refuses `save_pretrained`: the way back to its file's names is unknown. A fresh one does not.
    save_model(
        model.state_dict(),
        config,
        tokenizer,
        out_dir,
        dtype=torch.float32,
        generation_config=model.generation_config,
    )


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses the file's header three times and builds the table of names once per module; remember both:
    most of the conversion's time."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    for name, function in originals.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)
