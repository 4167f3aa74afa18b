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
from headway.config.paths import refuse_missing
from headway.data.encode import Encoder, FastEncoder, SlowEncoder
from headway.data.templates import ChatTemplate

#: How a plain text ends up between special tokens is found with this one.
_PROBE = "a"

_PATIENCE = 5.0  # seconds for the hub's one answer


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
        kinds = (np.uint8, np.uint16, np.uint32)
        return next(kind for kind in kinds if self.vocab_size <= np.iinfo(kind).max + 1)


def open_tokenizer(source: Any, *, key: str = "tokenizer", trust_remote_code: bool = False) -> Any:
    """A tokenizer from a folder, a hub name, or a .gguf file; a tokenizer object is returned as it is.

    Raises:
        UserError: there is none, or it cannot be read; names ``key``.
    """
    if not isinstance(source, (str, Path)):
        return source
    refuse_missing(source, key)
    from transformers import AutoTokenizer

    path = Path(source).expanduser()
    if path.exists() and not path.is_dir() and not (path.suffix == ".gguf" and path.is_file()):
        # The library would take it for a hub name, and a pipe would be waited for.
        raise UserError(f"{key} {source}: is no folder; give the one that holds tokenizer.json, or a .gguf file")
    try:
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        if path.exists():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
        return _from_hub(str(source), key, trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # the library raises a dozen kinds, from OSError to bare Exception out of Rust
        raise UserError(f"{key} {source}: no tokenizer could be read ({_in_short(error)})") from error


def _from_hub(name: str, key: str, trust_remote_code: bool) -> Any:
    """By hub name: from the cache where it is there, else from the hub, which is asked once before it is tried.

    The library itself asks for every possible file, several times with growing pauses: a minute without a network.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers import AutoTokenizer

    try:
        hf_hub_download(name, "tokenizer_config.json", local_files_only=True)
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=trust_remote_code)
    except (LocalEntryNotFoundError, OSError):
        pass  # not in the cache, or not all of it
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{key} {name}: neither a folder here nor in the hub's cache, and HF_HUB_OFFLINE is set")
    why = _hub_refuses(name)
    if why:
        raise UserError(f"{key} {name}: no folder here, not in the hub's cache, and {why}")
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _hub_refuses(name: str) -> str:
    """Why the hub does not give a model; empty when it knows it. One request, a few seconds."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_PATIENCE)
    except GatedRepoError:
        return "the hub gives it only to those it knows (log in with `hf auth login`)"
    except RepositoryNotFoundError:
        return "the hub has no model of this name"
    except Exception as error:  # the kind depends on the library's version and on what part of the network fails
        return f"the hub cannot be reached ({_in_short(error)})"
    return ""


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


def read_template(path: str | Path) -> str:
    """The text of a Jinja file. Raises UserError where it cannot be read."""
    file = Path(path).expanduser()
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"data.chat_template: {path} is not a regular file")  # a pipe would be waited for
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: {path} cannot be read ({error})") from None


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
        sources, where = {"default": read_template(path)}, str(path)
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
