"""What preparing data needs of a tokenizer, taken once: its Rust backend, special tokens, templates, and a hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from headway.account.errors import UserError
from headway.data.encode import Encoder, FastEncoder, SlowEncoder
from headway.data.templates import ChatTemplate

#: How a plain text ends up between special tokens is found with this one.
_PROBE = "a"


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer, taken apart.

    ``spec``: the tokenizer.json of a tokenizer with a Rust backend, without post-processor, padding and truncation; ""
    for others. ``bos``/``eos``: ids put before and behind a plain text by the tokenizer itself. ``added``: texts of the
    added tokens. ``templates``: name -> source of its chat templates. ``dtype``: smallest unsigned type for the ids.
    """

    path: str
    sha256: str
    vocab_size: int
    eos_token: str
    eos_token_id: int | None
    bos: tuple[int, ...]
    eos: tuple[int, ...]
    added: tuple[str, ...]
    special: dict[str, str]
    templates: dict[str, str]
    spec: str

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32


def open_tokenizer(source: Any) -> Any:
    """A tokenizer from a folder, a model name, or a .gguf file; a tokenizer object is returned as it is.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if not isinstance(source, (str, Path)):
        return source
    from transformers import AutoTokenizer

    path = Path(source).expanduser()
    try:
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoTokenizer.from_pretrained(str(path) if path.exists() else str(source))
    except Exception as error:  # the library raises a dozen kinds, from OSError to bare Exception out of Rust
        raise UserError(f"{source}: no tokenizer could be read ({' '.join(str(error).split())[:160]})") from error


def take_apart(tokenizer: Any, path: str = "") -> TokenizerInfo:
    """Everything `prepare` needs of a transformers tokenizer. The tokenizer is not changed.

    ``path``: where it was read from, as given by the user; else what the tokenizer says of itself.
    """
    special = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    added = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
    spec = _spec(tokenizer)
    vocabulary = tokenizer.get_vocab()
    vocab_size = max(len(tokenizer), max(vocabulary.values(), default=-1) + 1)
    bos, eos = _around(tokenizer)
    content = spec or json.dumps(sorted(vocabulary.items()), ensure_ascii=False)
    identity = json.dumps([type(tokenizer).__name__ if not spec else "", content, special, bos, eos], sort_keys=True)
    templates = tokenizer.chat_template
    return TokenizerInfo(
        path=path or str(tokenizer.name_or_path),
        sha256=hashlib.sha256(identity.encode()).hexdigest(),
        vocab_size=vocab_size,
        eos_token=tokenizer.eos_token or "",
        eos_token_id=tokenizer.eos_token_id,
        bos=bos,
        eos=eos,
        added=added,
        special=special,
        templates={"default": templates} if isinstance(templates, str) else dict(templates or {}),
        spec=spec,
    )


def make_encoder(info: TokenizerInfo, tokenizer: Any = None) -> Encoder:
    """The encoder for a tokenizer; one without a Rust backend must be given itself."""
    if info.spec:
        return FastEncoder(Tokenizer.from_str(info.spec), info.dtype)
    return SlowEncoder(tokenizer, info.dtype)


def load_templates(
    info: TokenizerInfo, path: str | None, options: dict[str, Any], date: str
) -> tuple[str, dict[str, ChatTemplate]]:
    """Where the chat template comes from ("tokenizer", the path given, or "none"), and templates by name.

    Raises:
        UserError: the file cannot be read, or the tokenizer has several templates and no default.
    """
    if path is not None:
        try:
            sources = {"default": Path(path).expanduser().read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.chat_template: {path} cannot be read ({error})") from None
        where = str(path)
    else:
        sources, where = info.templates, "tokenizer" if info.templates else "none"
    if sources and "default" not in sources:
        names = ", ".join(sorted(sources))
        raise UserError(f"the tokenizer has chat templates {names} and no default; set data.chat_template to a file")
    return where, {name: ChatTemplate(text, info.special, options, date) for name, text in sources.items()}


def _spec(tokenizer: Any) -> str:
    """The backend's JSON without what only decorates its output; a post-processor trims the offsets of spaces."""
    if not getattr(tokenizer, "is_fast", False):
        return ""
    spec = orjson.loads(tokenizer.backend_tokenizer.to_str())
    spec.update(post_processor=None, padding=None, truncation=None)
    return orjson.dumps(spec).decode()


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bare = tokenizer.encode(_PROBE, add_special_tokens=False)
    full = tokenizer.encode(_PROBE, add_special_tokens=True)
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return tuple(full[:at]), tuple(full[at + len(bare) :])
    return (), ()
