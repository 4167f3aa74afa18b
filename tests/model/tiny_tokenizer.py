"""A real fast tokenizer of a few words, made here."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *["the", "cat", "sat", "on", "mat", "and", "a", "dog", "ran", "off"]]
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + '</s>' }}{% endfor %}"


def tiny_tokenizer(words: list[str] | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(words or WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
