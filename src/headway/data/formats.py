"""One record of any supported format -> one sample: a chat, a prompt with its completion, or plain text.

Nothing here knows a tokenizer or a template. Whatever cannot be understood is a `BadRecord` with a reason; it is never
guessed at and never dropped without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from headway.data.turns import BadRecord, parse_tools, parse_turn

Format = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]

#: The formats, with the keys that a record of it must have (any one of the inner tuple).
FORMATS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages", "conversations", "conversation"),),
    "sharegpt": (("conversations", "conversation", "messages"),),
    "alpaca": (("instruction",), ("output",)),
    "prompt_completion": (("prompt",), ("completion", "response")),
    "text": (("text",),),
}

#: What stands in a format's place where no record showed one.
NO_FORMAT = "unknown"

_CHAT_KEYS = ("messages", "conversations", "conversation")

# The prompts of the Stanford Alpaca release, used where a tokenizer has no chat template.
_ALPACA_INTRO = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
)
_ALPACA_PAIRED = ", paired with an input that provides further context"


@dataclass(slots=True)
class Chat:
    """A conversation. ``trained[i]`` is False where the data itself excludes message i from training (weight 0)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    trained: list[bool]


@dataclass(slots=True)
class Completion:
    """A prompt (context) and its completion (trained), as they stand, without a template."""

    prompt: str
    completion: str


@dataclass(slots=True)
class Text:
    """Plain text: every token is trained."""

    text: str


Sample = Chat | Completion | Text


def without_format(record: Any) -> BadRecord:
    """Why a record has none of the formats: what it holds, or which of its values is of the wrong kind."""
    wrong = _mistyped(record)
    if wrong:
        return BadRecord(wrong)
    known = "; ".join(f"{name} ({' + '.join('/'.join(keys) for keys in needed)})" for name, needed in FORMATS.items())
    holds = f"keys {', '.join(map(repr, list(record)[:10]))}" if isinstance(record, dict) else "no object"
    return BadRecord(f"holds {holds}, which is none of the formats {known}; give data.format")


def _mistyped(record: Any) -> str:
    """What is wrong with a record that has a format's key and no value of its kind; empty when it has no such key."""
    if not isinstance(record, dict):
        return ""
    for key in _CHAT_KEYS:
        if key in record:
            turns = record[key]
            if not isinstance(turns, list):
                return f"{key!r} is {_kind(turns)}, not a list of turns"
            if not turns:
                return f"{key!r} is an empty list"
            return f"the first turn of {key!r} is no object with 'role' (messages) or 'from' (sharegpt)"
    return f"'text' is {_kind(record['text'])}, not text" if "text" in record else ""


def detect_format(record: Any) -> Format | None:
    """The format whose keys a record has, or None."""
    if not isinstance(record, dict):
        return None
    for key in _CHAT_KEYS:
        turns = record.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if "role" in turns[0]:
                return "messages"
            if "from" in turns[0]:
                return "sharegpt"
    if "instruction" in record and "output" in record:
        return "alpaca"
    if "prompt" in record and ("completion" in record or "response" in record):
        return "prompt_completion"
    if isinstance(record.get("text"), str):
        return "text"
    return None


def parse_record(fmt: str, record: Any, *, chat_template: bool) -> Sample:
    """Turn one record into a sample.

    ``chat_template``: whether the tokenizer has one; an Alpaca record becomes a chat then, else the Alpaca prompt.

    Raises:
        BadRecord: the record does not have the format's shape; the reason names the key.
    """
    if fmt == NO_FORMAT:
        raise without_format(record)
    if not isinstance(record, dict):
        raise BadRecord(f"not an object but {_kind(record)}")
    if fmt in ("messages", "sharegpt"):
        return _chat(record)
    if fmt == "alpaca":
        return _alpaca(record, chat_template)
    if fmt == "prompt_completion":
        return _prompt_completion(record)
    return Text(_string(record, "text"))


def parse_json(raw: bytes) -> Any:
    """One JSON document.

    Raises:
        BadRecord: not UTF-8, or not JSON; the reason says where.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as bad:
            raise BadRecord(f"not UTF-8: byte 0x{raw[bad.start]:02x} at offset {bad.start}") from None
        raise BadRecord(f"not JSON: {error}") from None


def _chat(record: dict[str, Any]) -> Chat:
    key = next((k for k in _CHAT_KEYS if record.get(k) is not None), None)
    if key is None:
        raise BadRecord(f"no key {' or '.join(repr(k) for k in _CHAT_KEYS)}{_keys(record)}")
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{key!r} is {'an empty list' if turns == [] else _kind(turns)}, not a list of turns")
    messages, trained = [], []
    system = record.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
        trained.append(False)
    for number, turn in enumerate(turns, start=1):
        try:
            message, weight = parse_turn(turn)
        except BadRecord as error:
            raise BadRecord(f"{key}[{number}]: {error}") from None
        messages.append(message)
        trained.append(weight)
    # "functions" is the older name of the same thing in OpenAI's files.
    tools = record.get("tools") if record.get("tools") is not None else record.get("functions")
    return Chat(messages, parse_tools(tools), trained)


def _alpaca(record: dict[str, Any], chat_template: bool) -> Chat | Completion:
    instruction = _string(record, "instruction")
    given = _string(record, "input", default="")
    output = _string(record, "output")
    system = _string(record, "system", default="")
    history = record.get("history") or []
    if not all(isinstance(h, list) and len(h) == 2 and all(isinstance(s, str) for s in h) for h in history):
        raise BadRecord("'history' is not a list of [question, answer] pairs of strings")
    if not chat_template:
        return Completion(_alpaca_prompt(system, history, instruction, given), output)
    messages = [{"role": "system", "content": system}] if system else []
    question = f"{instruction}\n{given}" if given else instruction
    for asked, answered in [*history, [question, output]]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return Chat(messages, None, [True] * len(messages))


def _alpaca_prompt(system: str, history: list[list[str]], instruction: str, given: str) -> str:
    parts = [system or _ALPACA_INTRO.format(_ALPACA_PAIRED if given else "")]
    for asked, answered in history:
        parts.append(f"### Instruction:\n{asked}\n\n### Response:\n{answered}")
    parts.append(f"### Instruction:\n{instruction}")
    if given:
        parts.append(f"### Input:\n{given}")
    return "\n\n".join([*parts, "### Response:\n"])


def _prompt_completion(record: dict[str, Any]) -> Chat | Completion:
    key = "completion" if record.get("completion") is not None else "response"
    prompt, completion = record.get("prompt"), record.get(key)
    if isinstance(prompt, list) and isinstance(completion, list):
        # Both are lists of turns: a chat in which only the completion's turns are trained.
        chat = _chat({"messages": prompt + completion, "tools": record.get("tools")})
        chat.trained[: len(prompt)] = [False] * len(prompt)
        return chat
    return Completion(_string(record, "prompt"), _string(record, key))


def _string(record: dict[str, Any], key: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if value is None and default is not None:
        return default
    if isinstance(value, str):
        return value
    if key not in record:
        raise BadRecord(f"no key {key!r}{_keys(record)}")
    raise BadRecord(f"{key!r} is {_kind(value)}, not a string")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _keys(record: dict[str, Any]) -> str:
    return f" (it has {', '.join(map(repr, list(record)[:8]))})" if record else " (it is empty)"
