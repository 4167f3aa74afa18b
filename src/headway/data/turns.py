"""One turn of a conversation, in the spellings found in the wild, -> one message that chat templates understand.

A message has ``role`` and ``content`` (a string, or absent beside tool calls) and, where given, ``reasoning_content``,
``tool_calls`` (arguments as an object), ``name`` and ``tool_call_id``.
"""

from __future__ import annotations

import difflib
from typing import Any

import orjson


class BadRecord(Exception):
    """A record that cannot become a sample; the message is the reason shown to the user."""


#: Speakers of ShareGPT files, and a few spellings of roles, -> the role templates know. Others are kept as they are.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function": "tool",
}

_PLAIN = frozenset({"system", "user", "assistant"})

#: The roles that templates have a place for.
STANDARD = _PLAIN | {"tool", "developer"}

_KNOWN = frozenset(ROLES) | STANDARD

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def parse_turn(turn: Any) -> tuple[dict[str, Any], bool]:
    """The message of one turn, and whether the data allows training on it (False for OpenAI's ``weight: 0``).

    Raises:
        BadRecord: the turn has no role, or content that is not text.
    """
    if not isinstance(turn, dict):
        raise BadRecord("not an object with a role and content")
    if len(turn) == 2 and type(turn.get("role")) is str and turn["role"] in _PLAIN and type(turn.get("content")) is str:
        return turn, True  # nearly every turn of nearly every file
    spoken = turn.get("role", turn.get("from"))
    if not isinstance(spoken, str) or not spoken:
        raise BadRecord("no 'role' (or 'from')")
    value = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if spoken == "function_call":
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": _calls(_json(value, spoken))}
    else:
        message = {"role": _role(spoken)}
        _set_content(message, value)
    for key in _REASONING_KEYS:
        if isinstance(turn.get(key), str) and turn[key]:
            message["reasoning_content"] = turn[key]
            break
    if turn.get("tool_calls"):
        message["tool_calls"] = _calls(_json(turn["tool_calls"], "tool_calls"))
    elif turn.get("function_call"):  # OpenAI's older spelling of one call
        message["tool_calls"] = _calls(_json(turn["function_call"], "function_call"))
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    if "content" not in message:
        if "tool_calls" not in message:
            raise BadRecord(f"the {message['role']} turn has no content")
        message["content"] = ""
    return message, turn.get("weight") != 0


def _role(spoken: str) -> str:
    """Raises BadRecord for what looks like a misspelt role: as a role of its own, none of its turns would be trained.

    Others are kept: which roles there are is the template's matter.
    """
    lowered = spoken.lower()
    if lowered in _KNOWN:
        return ROLES.get(lowered, lowered)
    near = difflib.get_close_matches(lowered, _KNOWN, n=1, cutoff=0.8)
    if near and not lowered[-1].isdigit():  # user_2 is somebody
        raise BadRecord(f"role {spoken!r} is not known; did you mean {near[0]!r}?")
    return spoken


def parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool definitions, given as a list or as JSON text, each as ``{"type": "function", "function": {...}}``.

    Raises:
        BadRecord: not a list of objects.
    """
    if tools is None or tools == "" or tools == []:
        return None
    tools = _json(tools, "tools")
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("'tools' is not a list of objects")
    # Templates print a tool as it is; the unwrapped spelling would teach another prompt than the one used later.
    wrapped = [t if "function" in t or "name" not in t else {"type": "function", "function": t} for t in tools]
    return wrapped or None


def _set_content(message: dict[str, Any], value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        message["content"] = value
    elif isinstance(value, list):
        _set_parts(message, value)
    elif message["role"] == "tool":
        message["content"] = orjson.dumps(value).decode()  # a tool's answer is often an object
    else:
        raise BadRecord("content is neither text nor a list of parts")


def _set_parts(message: dict[str, Any], parts: list[Any]) -> None:
    texts, reasoning, calls = [], [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise BadRecord("a content part is neither text nor an object")
        kind = part.get("type", "text")
        value = part.get("value", part.get("text", part.get(kind)))
        if kind in ("text", "input_text", "output_text", "refusal") and isinstance(value, str):
            texts.append(value)
        elif kind in ("reasoning", "thinking") and isinstance(value, str):
            reasoning.append(value)
        elif kind in ("tool_call", "function_call") and value is not None:
            calls += _calls(_json(value, kind))
        else:
            raise BadRecord(f"content part of type {kind!r}: only text, reasoning and tool calls can be trained on")
    message["content"] = "".join(texts)
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls


def _calls(value: Any) -> list[dict[str, Any]]:
    calls = []
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord("a tool call has no function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            # Templates print arguments as JSON; text that is JSON already would come out quoted twice.
            try:
                decoded = orjson.loads(arguments)
                arguments = decoded if isinstance(decoded, dict) else arguments
            except orjson.JSONDecodeError:
                pass
        call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(item.get("id"), str):
            call["id"] = item["id"]
        calls.append(call)
    return calls


def _json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        raise BadRecord(f"{name!r} is text that is not JSON") from None
