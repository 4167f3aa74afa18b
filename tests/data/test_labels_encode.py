"""Tokens and masks: the fast way against token by token, on every kind of tokenizer, cut where an edge needs it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat_material import (
    CHATML,
    GENERATION,
    LLAMA3,
    Characters,
    byte_level,
    conversation,
    metaspace,
    reference_mask,
    reference_spans,
)
from headway.data.encode import Document, Encoded, FastEncoder, Flat
from headway.data.tokenizer import make_encoder, take_apart
from headway.data.turns import BadRecord

BYTE_LEVEL = byte_level(CHATML)
NFC = byte_level(CHATML, nfc=True)


def encode(tokenizer: Any, *documents: Document) -> list[Any]:
    return make_encoder(take_apart(tokenizer), tokenizer).encode(documents)


def labelled(tokenizer: Any, messages: list[dict[str, str]], end: str) -> Document:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return Document([text], reference_spans(tokenizer, messages, end))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000), edges=st.booleans())
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, NFC, byte_level(LLAMA3)], ids=["chatml", "nfc", "llama3"])
def test_masks_are_those_found_token_by_token(tokenizer: Any, seed: int, edges: bool) -> None:
    dice = random.Random(seed)
    end = "<|eot_id|>" if "eot_id" in tokenizer.chat_template else "<|im_end|>"
    documents = [labelled(tokenizer, conversation(dice, edges=edges), end) for _ in range(4)]
    for document, result in zip(documents, encode(tokenizer, *documents), strict=True):
        text = document.pieces[0]
        assert isinstance(result, Encoded)
        assert result.mask.tolist() == reference_mask(tokenizer, result.ids.tolist(), text, document.spans)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (result.ids.tolist() == whole) == (result.cut == 0)
        assert tokenizer.decode(result.ids.tolist()) == tokenizer.decode(whole)


def test_the_reference_catches_planted_wrong_masks() -> None:
    """The reference is only worth something if it objects: to a line end trained, an end token not trained, a cut token."""
    document = labelled(
        BYTE_LEVEL, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}], "<|im_end|>"
    )
    (result,) = encode(BYTE_LEVEL, document)
    text, (span,) = document.pieces[0], document.spans
    for planted in [(span[0], span[1] + 1), (span[0], span[1] - len("<|im_end|>")), (span[0] - 1, span[1])]:
        (wrong,) = encode(BYTE_LEVEL, Document([text], [planted]))
        assert wrong.mask.tolist() != reference_mask(BYTE_LEVEL, result.ids.tolist(), text, [span])
    whole = BYTE_LEVEL("x the y", add_special_tokens=False)["input_ids"]
    with pytest.raises(AssertionError, match="edge of a span"):
        reference_mask(BYTE_LEVEL, whole, "x the y", [(3, 5)])


def test_a_token_over_the_edge_is_cut_there() -> None:
    # "\n\n" is one token of this tokenizer: the line end of the header and the first of the answer.
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\nx"}]
    document = labelled(BYTE_LEVEL, turns, "<|im_end|>")
    whole = BYTE_LEVEL(document.pieces[0], add_special_tokens=False)["input_ids"]
    with pytest.raises(AssertionError, match="edge of a span"):
        reference_mask(BYTE_LEVEL, whole, document.pieces[0], document.spans)
    (result,) = encode(BYTE_LEVEL, document)
    assert result.cut == 1
    before = BYTE_LEVEL(document.pieces[0][: document.spans[0][0]], add_special_tokens=False)["input_ids"]
    assert result.ids[: len(before)].tolist() == before  # what the model sees before it answers
    assert BYTE_LEVEL.decode(result.ids[result.mask == 1]) == "\n\nx<|im_end|>"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000))
@pytest.mark.parametrize("prefix", ["never", "first", "always"])
def test_tokenizers_with_character_offsets(prefix: str, seed: int) -> None:
    tokenizer = metaspace(CHATML, prefix=prefix)
    document = labelled(tokenizer, conversation(random.Random(seed), edges=True), "<|im_end|>")
    (result,) = encode(tokenizer, document)
    if isinstance(result, BadRecord):
        # A space that the tokenizer puts before every text cannot be kept out of the middle of one.
        assert "cannot be cut there" in str(result) and prefix != "never"
        return
    text = document.pieces[0]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(result.ids.tolist()) == tokenizer.decode(whole)  # no space came in where it was cut
    answers = "".join(text[a:b] for a, b in document.spans)
    shown = tokenizer.decode(result.ids[result.mask == 1], skip_special_tokens=False)
    assert "".join(shown.split()) == "".join(tokenizer.decode(tokenizer(answers)["input_ids"]).split())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert int((result.ids[result.mask == 1] == end).sum()) == len(document.spans)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_widths_and_offsets_find_the_same_edges(seed: int) -> None:
    dice = random.Random(seed)
    documents = [labelled(BYTE_LEVEL, conversation(dice, edges=True), "<|im_end|>") for _ in range(3)]
    fast = make_encoder(take_apart(BYTE_LEVEL))
    by_width = fast.encode(documents)
    fast._widths = None  # type: ignore[attr-defined]
    for one, other in zip(by_width, fast.encode(documents), strict=True):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.mask, other.mask) and one.cut == other.cut  # type: ignore[union-attr]


def test_widths_are_known_for_every_text_of_a_byte_level_tokenizer() -> None:
    """Else all documents would quietly take the slower way, and the test above would compare it with itself."""
    tokenizer = byte_level(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<｜end▁of▁sentence｜>"]})
    info = take_apart(tokenizer)
    documents = [labelled(tokenizer, conversation(random.Random(s), edges=True), "<|im_end|>") for s in range(40)]
    documents.append(Document(["été<｜end▁of▁sentence｜>你好", "🙂"], [(3, 22), (24, 25)]))
    encoder = make_encoder(info)
    assert isinstance(encoder, FastEncoder) and encoder._widths
    encodings = encoder.backend.encode_batch([p for d in documents for p in d.pieces], add_special_tokens=False)
    _edges, known = encoder._widths.edges(documents, Flat(documents, encodings, info.dtype))
    assert known.all()
    (result,) = encoder.encode(documents[-1:])
    assert isinstance(result, Encoded)
    assert tokenizer.decode(result.ids[result.mask == 1]) == "<｜end▁of▁sentence｜>🙂"


def test_lengths_that_nfc_changes_and_changes_back_do_not_deceive() -> None:
    # Three letters lose a byte each, one letter gains three: the sum is right and every edge between is not.
    before, after = "e\u0301" * 3, "\u0958"
    (result,) = encode(NFC, Document([before + after], [(len(before), len(before) + 1)]))
    assert isinstance(result, Encoded)
    assert NFC.decode(result.ids[result.mask == 1]) == "\u0915\u093c"


def test_a_text_that_nfc_changes_is_left_to_the_offsets() -> None:
    decomposed = "<|im_start|>assistant\ne\u0301te\u0301 x<|im_end|>\n"
    start = len("<|im_start|>assistant\n")
    (result,) = encode(NFC, Document([decomposed], [(start, len(decomposed) - 1)]))
    assert NFC.decode(result.ids[result.mask == 1]) == "été x<|im_end|>"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000), edges=st.booleans())
def test_tokenizers_without_a_rust_backend(seed: int, edges: bool) -> None:
    dice = random.Random(seed)
    tokenizer = Characters(chat_template=CHATML)
    messages = conversation(dice, edges=edges)
    for message in messages:
        message["content"] = "".join(c for c in message["content"] if c in tokenizer.get_vocab()) or "a"
    document = labelled(tokenizer, messages, "<|im_end|>")
    (result,) = encode(tokenizer, document)
    pieces = tokenizer.convert_ids_to_tokens(result.ids.tolist())
    assert "".join(pieces) == document.pieces[0]
    at, expected = 0, []
    for piece in pieces:
        inside = {any(a <= at + k < b for a, b in document.spans) for k in range(len(piece))}
        assert len(inside) == 1
        expected.append(int(inside.pop()))
        at += len(piece)
    assert result.mask.tolist() == [0, *expected[1:]]


def test_head_and_tail_and_pieces() -> None:
    (result, empty) = encode(
        BYTE_LEVEL,
        Document(["a b", "c"], [(3, 4)], head=(5,), tail=(1,)),
        Document([], [(0, 0)], head=(), tail=(1,)),
    )
    ids = [BYTE_LEVEL(text, add_special_tokens=False)["input_ids"] for text in ("a b", "c")]
    assert result.ids.tolist() == [5, *ids[0], *ids[1], 1]
    assert result.mask.tolist() == [0] + [0] * len(ids[0]) + [1] * len(ids[1]) + [1]
    assert empty.ids.tolist() == [1] and empty.mask.tolist() == [0]  # nothing precedes a first token


def test_the_end_token_is_learned_though_it_pads() -> None:
    """P15: labels come from positions, so it does not matter which ids are the same."""
    tokenizer = byte_level(GENERATION, pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    document = labelled(
        tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "<|im_end|>"
    )
    (result,) = encode(tokenizer, document)
    ends = result.mask[result.ids == tokenizer.eos_token_id]
    assert ends.tolist() == [0, 1]  # the user's is context, the assistant's is learned


def test_ids_take_the_smallest_type() -> None:
    info = take_apart(BYTE_LEVEL)
    assert info.dtype is np.uint16 and info.vocab_size == len(BYTE_LEVEL)
    (result,) = encode(BYTE_LEVEL, Document(["a"], []))
    assert result.ids.dtype == np.uint16


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_generation_blocks_give_the_mask_that_transformers_gives(seed: int) -> None:
    """Where no token spans an edge; there transformers trains the token that holds the header's line end as well."""
    tokenizer = byte_level(GENERATION)
    messages = conversation(random.Random(seed))
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    (ours,) = encode(tokenizer, labelled(tokenizer, messages, "<|im_end|>"))
    assert ours.cut == 0
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.mask.tolist() == theirs["assistant_masks"]
