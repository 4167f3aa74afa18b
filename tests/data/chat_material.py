"""Tokenizers made on the spot, chat templates good and bad, and the slow, obvious labelling to compare with."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: A default system turn where none is given, as SmolLM2 has.
SMOL = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
#: No generation prompt at all: the user's turn itself makes the assistant speak.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
#: Something more after the last turn of a conversation, as Phi-3 has.
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Generation blocks whose author forgot the end token, or took the line end in.
GENERATION_SHORT = GENERATION.replace("<|im_end|>{% endgeneration %}\n", "{% endgeneration %}<|im_end|>\n")
GENERATION_LONG = GENERATION.replace("<|im_end|>{% endgeneration %}\n", "<|im_end|>\n{% endgeneration %}")
NO_END = (
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Templates under which prefixes do not agree.
#: The last answer gets an empty <think> block, earlier ones none (as Qwen3 has).
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Reasoning is stripped from all answers but the last (as DeepSeek-R1 and Qwen3 do).
STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The system prompt is put into the last user turn (as Mistral does).
SYSTEM_LAST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in turns %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in turns %}<|im_start|>{{ m['role'] }}\n{% if loop.index0 == ns.last and system %}{{ system }}\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
LINES = [
    "the quick brown fox jumps over the lazy dog\n", "Hello there, how are you doing today?\n\n\n", "user assistant system",
    "  indented code:\n    return x + 1\n", "été Ünïcödé 你好 🙂", "<think>\nwhat now\n</think>\n\n", "[INST] yes [/INST]",
    "\n\n  twice\n\n  again", "### Response:\n", '{"name": "tool", "arguments": {"x": 1}}',
]  # fmt: skip


def byte_level(
    template: str | None = None, *, eos: str = "<|im_end|>", pad: str | None = None, nfc: bool = False
) -> Any:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    if nfc:
        core.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(LINES * 3, trainer)
    return _wrap(core, template, eos, pad)


def metaspace(template: str | None = None, *, eos: str = "</s>", prefix: str = "never") -> Any:
    """SentencePiece-like BPE; ``prefix="always"`` puts a space before every text."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=True)
    core.decoder = decoders.Metaspace(prepend_scheme=prefix, split=True)
    alphabet = sorted({c for line in LINES for c in line.replace(" ", "▁")})
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(LINES * 3, trainer)
    return _wrap(core, template, eos, None)


def with_bos(tokenizer: Any) -> Any:
    """The tokenizer, putting <s> before every text of its own accord (as Llama does)."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    )
    return tokenizer


class Characters(PreTrainedTokenizer):
    """A tokenizer without a Rust backend: pairs of letters where it can, else single characters."""

    def __init__(self, **options: Any) -> None:
        self._text = sorted({c for line in LINES for c in line} | set("abcdefghijklmnopqrstuvwxyzABCDEFGH"))
        self._pieces = [*SPECIAL, *self._text, "th", "\n\n", "er"]
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        super().__init__(additional_special_tokens=SPECIAL, eos_token="<|im_end|>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        tokens, at = [], 0
        while at < len(text):
            step = 2 if text[at : at + 2] in self._ids else 1
            tokens.append(text[at : at + step])
            at += step
        return tokens

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def _wrap(core: Tokenizer, template: str | None, eos: str, pad: str | None) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, bos_token="<s>", pad_token=pad or eos)
    if template:
        tokenizer.chat_template = template
    return tokenizer


# -- conversations ---------------------------------------------------------------------------------------------------

FRAGMENTS = [
    "hello", "the quick brown fox", "été", "你好", "🙂 ok", "a", "  x = 1", "line\nline", "<b>", "assistant", "user\n",
    "yes.", "\t", "x<|im", "</s", "Response:",
]  # fmt: skip


def conversation(dice: random.Random, *, edges: bool = False, system: bool | None = None) -> list[dict[str, str]]:
    """A chat of 1 to 4 exchanges. ``edges``: contents may begin and end with white space."""
    messages = []
    if dice.random() < 0.4 if system is None else system:
        messages.append({"role": "system", "content": _content(dice, edges)})
    for _ in range(dice.randint(1, 4)):
        messages.append({"role": "user", "content": _content(dice, edges)})
        messages.append({"role": "assistant", "content": _content(dice, edges)})
    if dice.random() < 0.2:
        messages.append({"role": "user", "content": _content(dice, edges)})
    return messages


def _content(dice: random.Random, edges: bool) -> str:
    text = " ".join(dice.choices(FRAGMENTS, k=dice.randint(1, 5)))
    if not edges:
        return text.strip() or "a"
    return dice.choice(["", "\n", "\n\n", " ", "   "]) + text + dice.choice(["", "\n", " "])


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# -- the slow, obvious way -------------------------------------------------------------------------------------------


def reference_spans(
    tokenizer: Any, messages: list[dict[str, Any]], end: str, tools: Any = None
) -> list[tuple[int, int]]:
    """Trained character spans from transformers' own rendering of every prefix."""

    def render(turns: list[dict[str, Any]], prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt)

    whole, spans = render(messages), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(messages[:i], prompt=True))
            upto = render(messages[: i + 1])
            spans.append((start, upto.rindex(end) + len(end)))
            assert whole.startswith(upto[: spans[-1][1]])
    return spans


def byte_map() -> dict[str, int]:
    """The characters byte-level tokenizers spell bytes with."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {chr(c): b for b, c in [*zip(kept, kept, strict=True), *((b, 256 + i) for i, b in enumerate(others))]}


def reference_mask(tokenizer: Any, ids: list[int], text: str, spans: list[tuple[int, int]]) -> list[int]:
    """Token by token: 1 where all of a token's bytes lie in a span; fails where only some do."""
    table = byte_map()
    trained = set()
    for start, stop in spans:
        trained |= set(range(len(text[:start].encode()), len(text[:stop].encode())))
    at, mask = 0, []
    for i in ids:
        token = tokenizer.convert_ids_to_tokens(i)
        data = token.encode() if token in SPECIAL else bytes(table[c] for c in token)
        assert text.encode()[at : at + len(data)] == data, "the tokens do not spell the text"
        inside = {at + k in trained for k in range(len(data))}
        assert len(inside) == 1, "a token spans the edge of a span"
        mask.append(int(inside.pop()))
        at += len(data)
    assert at == len(text.encode())
    return [0, *mask[1:]]
