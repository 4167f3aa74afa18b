"""Labels are decoded while data is prepared: wrong ones, however they came about, stop it and show the difference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.chat_material import (
    CHATML,
    GENERATION,
    LLAMA3,
    Characters,
    byte_level,
    conversation,
    metaspace,
    with_bos,
    write_jsonl,
)
from headway.account.errors import UserError
from headway.data.decoded import difference
from headway.data.encode import Document, Encoded
from headway.data.formats import Chat
from headway.data.labels import Labeller
from headway.data.prepare import prepare
from headway.data.templates import ChatTemplate
from headway.data.tokenizer import make_encoder, take_apart
from headway.data.units import Recipe

TOKENIZERS: dict[str, Any] = {
    "bytes": byte_level(CHATML),
    "bytes with blocks": byte_level(GENERATION),
    "bytes, composed": byte_level(CHATML, nfc=True),
    "bytes and a beginning": with_bos(byte_level(LLAMA3, eos="<|eot_id|>")),
    "SentencePiece": metaspace(CHATML, eos="<|im_end|>"),
    "SentencePiece, space first": metaspace(CHATML, eos="<|im_end|>", prefix="always"),
    "without Rust": Characters(chat_template=CHATML),
}


def documents(name: str, count: int, seed: int = 0) -> list[Document]:
    dice, tokenizer = random.Random(seed), TOKENIZERS[name]
    labeller = Labeller(ChatTemplate(tokenizer.chat_template, {"bos_token": "<s>"}), take_apart(tokenizer).added)
    chats = [conversation(dice, edges=dice.random() < 0.3) for _ in range(count)]
    if not name.startswith("bytes"):
        # They know few characters, and what they do not know does not come back.
        chats = [[{"role": m["role"], "content": "the quick father"} for m in chat] for chat in chats]
    found = [labeller.label(Chat(chat, None, [True] * len(chat))) for chat in chats]
    return [Document([text], spans) for text, spans in found]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_right_labels_pass_and_wrong_ones_do_not_whatever_the_tokenizer(name: str) -> None:
    encoder = make_encoder(take_apart(TOKENIZERS[name]), TOKENIZERS[name])
    made = documents(name, 40)
    pairs = [(d, e) for d, e in zip(made, encoder.encode(made), strict=True) if isinstance(e, Encoded)]
    assert len(pairs) > 20
    for document, encoded in pairs:
        assert difference(document, encoded, encoder.decode) is None
    for harm in HARMS.values():
        harmed = [(d, Encoded(e.ids, harm(e.mask.copy()))) for d, e in pairs if d.spans]
        assert all(difference(d, e, encoder.decode) for d, e in harmed), harm.__name__


def _earlier(mask: np.ndarray) -> np.ndarray:
    """The token before each answer is trained too: the header's line end."""
    mask[:-1] |= mask[1:]
    return mask


def _shorter(mask: np.ndarray) -> np.ndarray:
    """The last token of each answer is not trained: its end token."""
    return mask & np.append(mask[1:], np.uint8(0))


def _shifted(mask: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], mask[:-1]]).astype(np.uint8)


def _all(mask: np.ndarray) -> np.ndarray:
    return np.array([0] + [1] * (len(mask) - 1), dtype=np.uint8)


def _none(mask: np.ndarray) -> np.ndarray:
    return mask * 0


def _others(mask: np.ndarray) -> np.ndarray:
    """What is context is trained, and what is to be learned is not."""
    return 1 - mask


HARMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    harm.__name__: harm for harm in (_earlier, _shorter, _shifted, _all, _none, _others)
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_planted_wrong_labels_stop_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[np.ndarray], np.ndarray]
) -> None:
    """In `prepare` itself, as a faulty encoder would give them; a chat far behind the first ones is noticed too."""
    tokenizer = TOKENIZERS["bytes"]
    chats = [{"messages": conversation(random.Random(0), system=False)}] * 300
    source = write_jsonl(tmp_path / "c.jsonl", chats)
    prepare(source, tmp_path / "right", tokenizer, workers=1)
    encoder = make_encoder(take_apart(tokenizer), tokenizer)
    encode = encoder.encode

    def harmed(documents: list[Document]) -> list[Any]:
        found: list[Any] = encode(documents)
        return [Encoded(e.ids, harm(e.mask) if number > 100 else e.mask) for number, e in enumerate(found)]

    monkeypatch.setattr(encoder, "encode", harmed)
    recipe = Recipe.converter
    monkeypatch.setattr(Recipe, "converter", lambda self: recipe(_with(self, encoder)))
    with pytest.raises(
        UserError, match=r"c.jsonl:128: the labels are wrong: the trained tokens read .* where the text"
    ):
        prepare(source, tmp_path / "wrong", tokenizer, workers=1)


def _with(recipe: Recipe, encoder: Any) -> Recipe:
    from dataclasses import replace

    return replace(recipe, encoder=encoder)
