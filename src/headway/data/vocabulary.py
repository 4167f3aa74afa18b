"""Are all token ids below the model's vocabulary? An id beyond it crashes a CPU run and corrupts a GPU one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from headway.account.errors import UserError
from headway.data.megatron import MegatronStore
from headway.data.store import DocumentStore
from headway.data.view import View
from headway.record.files import read_json, write_json


def check_vocabulary(view: View, model_vocab: int, remembered: Path | None = None) -> None:
    """Refuse data with a token id that a model of ``model_vocab`` entries has no embedding for.

    A store whose tokenizer has more entries than the model is fine as long as none of the surplus ids is used; only
    then, and where the store does not know its largest id, are tokens read. That may be terabytes, so what was found
    is kept in ``remembered`` (JSON: fingerprint of a store to its largest id).

    Raises:
        UserError: names the data source, file and line of the first offending document, and the id.
    """
    for number, store in enumerate(view.stores):
        if store.vocab_size > model_vocab:
            _check_store(number, store, model_vocab, remembered)


def _check_store(number: int, store: DocumentStore, model_vocab: int, remembered: Path | None) -> None:
    if isinstance(store, MegatronStore) and remembered is not None:
        largest: int | None = _remembered(store, remembered)
    else:
        largest = getattr(store, "max_token", None)  # known to folders of shards without reading a token
    if largest is not None and largest < model_vocab:
        return
    for doc in range(len(store.lengths)):
        tokens = store.tokens(doc)
        if len(tokens) and int(tokens.max()) >= model_vocab:
            file, line = store.source(doc)
            raise UserError(
                f"{file}:{line} (data source {number}): token id {int(tokens.max())} is beyond the model's vocabulary "
                f"of {model_vocab}; prepare the data with the model's own tokenizer, or resize the model's embedding"
            )


def _remembered(store: MegatronStore, path: Path) -> int:
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        read = read_json(path)
        known = {key: value for key, value in read.items() if type(value) is int} if isinstance(read, dict) else {}
    if store.fingerprint not in known:
        known[store.fingerprint] = store.max_token
        with contextlib.suppress(OSError):  # a full disk, or not ours to write in: it is read again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
    return known[store.fingerprint]
