"""Mixed real chats from five public packages: short ones, long ones, and tool calls. The material of `bench speed`.

Usage: python demo/make_mixed_chats.py OUT.jsonl [FOLDOC_FOLDER]
       (pip install --no-deps chitchat-dataset bfcl-eval champ-dataset chatterbot-corpus; Debian: dict-foldoc)

  chitchat-dataset   MIT          people talking to each other, up to tens of thousands of tokens
  bfcl-eval          Apache-2.0   questions with tools, one or several turns, answered by the expected calls
  champ-dataset      MIT          mathematics problems, answered by their solutions
  chatterbot-corpus  BSD          English small talk, a few tokens each
  dict-foldoc        GFDL         definitions of computing terms, asked for by name (default: /usr/share/dictd)
"""

from __future__ import annotations

import gzip
import json
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from make_material import conversations, package_folder

from headway.record.files import write_atomic

Chat = dict[str, Any]
_SINGLE_TURN = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
_MULTI_TURN = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param")
_TOOL_DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


def chat(*texts: str, system: str | None = None) -> Chat:
    """A chat whose first speaker is the user."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages}


def tool_chats(data: Path) -> Iterator[Chat]:
    """Questions with tools in the system message; the answer is the first of the accepted calls."""
    for name in (*_SINGLE_TURN, *_MULTI_TURN):
        answers = {
            item["id"]: item["ground_truth"] for item in _lines(data / "possible_answer" / f"BFCL_v4_{name}.json")
        }
        for item in _lines(data / f"BFCL_v4_{name}.json"):
            if name in _MULTI_TURN:
                yield _many_turns(data, item, answers[item["id"]])
            else:
                asked = "\n".join(message["content"] for message in item["question"][0])
                calls = [{key: _first(given) for key, given in call.items()} for call in answers[item["id"]]]
                yield chat(asked, json.dumps(calls, ensure_ascii=False), system=_tools(item["function"]))


def definitions(folder: Path) -> Iterator[Chat]:
    """A dictd dictionary: an index of (headword, offset, length), the numbers in base 64, into a compressed text."""
    text = gzip.decompress((folder / "foldoc.dict.dz").read_bytes())
    seen: set[tuple[int, int]] = set()
    for line in (folder / "foldoc.index").read_text(encoding="utf-8").splitlines():
        word, offset, length = line.split("\t")[:3]
        place = (_base64(offset), _base64(length))
        if word.startswith("00-database") or place in seen:
            continue  # alternative spellings point to the same definition
        seen.add(place)
        answer = text[place[0] : place[0] + place[1]].decode("utf-8", "replace").partition("\n")[2].strip()
        if answer:
            yield chat(f"What does {word} mean in computing?", answer)


_DIGITS = {
    letter: value for value, letter in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")
}


def _base64(number: str) -> int:
    value = 0
    for letter in number:
        value = value * 64 + _DIGITS[letter]
    return value


def _many_turns(data: Path, item: dict[str, Any], answers: list[list[str]]) -> Chat:
    tools = [
        tool
        for name in item["involved_classes"]
        for tool in _lines(data / "multi_turn_func_doc" / f"{_TOOL_DOCUMENTS[name]}.json")
    ]
    for tool in tools:
        tool.pop("response", None)  # what a call returns is no part of what a model is given
    texts: list[str] = []
    for turn, calls in zip(item["question"], answers, strict=True):
        if turn and calls:
            texts += ["\n".join(message["content"] for message in turn), "\n".join(calls)]
    return chat(*texts, system=_tools(tools))


def _first(arguments: dict[str, list[Any]]) -> dict[str, Any]:
    """Each argument's first accepted value; an argument that may be left out is left out."""
    return {key: values[0] for key, values in arguments.items() if values and values[0] != ""}


def _tools(tools: list[dict[str, Any]]) -> str:
    return "You may call these functions:\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def problem_chats(file: Path) -> Iterator[Chat]:
    for problem in json.loads(file.read_text(encoding="utf-8"))["problems"].values():
        yield chat(problem["_text"], "\n".join(step["_text"] for step in problem["solution"]["steps"]))


def small_talk(folder: Path) -> Iterator[Chat]:
    for file in sorted(folder.glob("*.yml")):
        for turns in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            texts = [str(turn) for turn in turns]
            if len(texts) >= 2:
                yield chat(*texts)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    out = Path(sys.argv[1])
    parts = {
        "chitchat-dataset": conversations(package_folder("chitchat_dataset") / "dataset.json"),
        "bfcl-eval": list(tool_chats(package_folder("bfcl_eval") / "data")),
        "champ-dataset": list(problem_chats(package_folder("champ_dataset") / "dataset_files" / "v0.json")),
        "chatterbot-corpus": list(small_talk(package_folder("chatterbot_corpus") / "data" / "english")),
    }
    foldoc = Path(sys.argv[2] if len(sys.argv) > 2 else "/usr/share/dictd")
    if (foldoc / "foldoc.index").is_file():
        parts["dict-foldoc"] = list(definitions(foldoc))
    else:
        print(f"dict-foldoc is not in {foldoc}: left out")
    write_atomic(out, "".join(json.dumps(item, ensure_ascii=False) + "\n" for part in parts.values() for item in part))
    for name, part in parts.items():
        print(f"{name}: {len(part)} chats")


if __name__ == "__main__":
    main()
