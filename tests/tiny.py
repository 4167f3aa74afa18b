"""A tiny chat model and tiny chats, made on the spot: enough for every path of a run, fast enough for a test."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "the a cat dog tree river runs sleeps sings under over blue red small old quick and then but never always".split()
)


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE tokenizer with ChatML, saved as Hugging Face does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


def config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        **changes,
    }


def make_chats(path: Path, count: int = 60, seed: int = 0, longest: int = 30) -> Path:
    """`count` short chats of one to three exchanges, as OpenAI messages."""
    dice = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(dice.randint(1, 3)):
                messages.append({"role": "user", "content": sentence(dice, longest)})
                messages.append({"role": "assistant", "content": sentence(dice, longest)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def sentence(dice: random.Random, longest: int) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(1, longest)))


def run_file(folder: Path, **sections: dict[str, Any]) -> Path:
    """A complete run file in `folder`, with its tokenizer and chats; sections override the defaults key by key."""
    import yaml

    tokenizer = make_tokenizer(folder / "tokenizer")
    chats = make_chats(folder / "chats.jsonl")
    content: dict[str, Any] = {
        "name": "tiny",
        "out": str(folder / "runs"),
        "device": "cpu",
        "model": {"config": config(), "tokenizer": str(tokenizer)},
        "data": {"sources": [str(chats)], "seq_len": 128, "slots": 160, "workers": 1},
        "train": {"steps": 6, "global_batch_sequences": 4},
        "optim": {"lr": 1e-3},
        "parallel": {"ranks": 1},
        "log": {"quiet": True},
    }
    for section, values in sections.items():
        content[section] = {**content.get(section, {}), **values} if isinstance(values, dict) else values
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
