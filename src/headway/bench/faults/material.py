"""A tiny model's tokenizer, chats and run file, made on the spot: a training that starts in a second or two."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_WORDS = ("the", "a", "cat", "dog", "tree", "river", "runs", "sings", "under", "over", "blue", "red", "small", "old")
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MODEL = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
_CONTENT: dict[str, Any] = {
    "data": {"seq_len": 64, "slots": 96}, "train": {"steps": 12, "global_batch_sequences": 6}, "optim": {"lr": 1e-3},
    "parallel": {"ranks": 2}, "checkpoint": {"every": 4},
}  # fmt: skip
_LONG: dict[str, Any] = {
    "model": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "data": {"seq_len": 128, "slots": 512, "prefetch": 1}, "train": {"steps": 60, "global_batch_sequences": 2},
    "optim": {"lr": 5e-3}, "schedule": {"kind": "constant"}, "parallel": {"ranks": 1}, "checkpoint": {"at_end": False},
}  # fmt: skip


def make_material(folder: Path, documents: int = 60) -> Path:
    """Makes `folder` with run.yaml, prepared shards and what they need; returns it. Kept as it is when there."""
    if not (folder / "run.yaml").is_file():
        _make(folder, documents, _CONTENT, 20)
    _preload(folder / "run.yaml")
    return folder


def make_long_material(folder: Path) -> Path:
    """The same for runs of sixty small steps on one rank, none of which is saved at its end."""
    if not (folder / "run.yaml").is_file():
        _make(folder, 900, _LONG, 40)
    return folder


def _preload(run_file: Path) -> None:
    """Once for all cases, which are forked from here."""
    from headway.config.load import load_run
    from headway.train.preload import preload

    preload(load_run(run_file, []).config)


def _make(folder: Path, documents: int, sections: dict[str, Any], longest: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(folder / "tokenizer")
    dice = random.Random(0)
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(documents):
            said = [{"role": role, "content": " ".join(dice.choices(_WORDS, k=dice.randint(3, longest)))}
                    for role in ("user", "assistant")]  # fmt: skip
            file.write(json.dumps({"messages": said}) + "\n")
    import yaml

    content = {
        "name": "run", "out": str(folder / "runs"), "device": "cpu", **sections,
        "model": {"config": {**_MODEL, **sections.get("model", {})}, "tokenizer": str(folder / "tokenizer")},
        "data": {"sources": [str(folder / "chats.jsonl")], "workers": 1, "shards": str(folder / "shards"),
                 **sections["data"]},
        "log": {"quiet": True, "profile_every": None},
    }  # fmt: skip
    (folder / "run.part").write_text(yaml.safe_dump(content), encoding="utf-8")
    _prepare(folder / "run.part")
    (folder / "run.part").rename(folder / "run.yaml")


def _prepare(run_file: Path) -> None:
    from headway.config.load import load_run
    from headway.train.data import prepare_sources

    prepare_sources(load_run(run_file, []).config, say=lambda text: None)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator([" ".join(_WORDS)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = _CHATML
    fast.save_pretrained(folder)
