"""Messages made to fit a template that has no place for tools, tool calls or reasoning.

Such a template would leave them out without a word, and the model would learn to call tools it was never shown. They
are written as text instead, in the form that Hermes and Qwen models use, and every sample that this happens to is
counted.
"""

from __future__ import annotations

from typing import Any

import orjson

from headway.data.templates import ChatTemplate, Message

TOOLS_AS_TEXT = "tools_as_text"
CALLS_AS_TEXT = "tool_calls_as_text"
REASONING_AS_TEXT = "reasoning_as_text"

#: What the counts in the manifest's ``notes`` mean, for the one line that is printed for each.
NOTES = {
    TOOLS_AS_TEXT: "the chat template has no place for tools; they were written into the system turn as text",
    CALLS_AS_TEXT: "the chat template has no place for tool calls; they were written as <tool_call> text",
    REASONING_AS_TEXT: "the chat template has no place for reasoning; it was written as <think> text before the answer",
}

_TOOLS = """# Tools

You may call one or more functions. Their signatures are:
<tools>
{}
</tools>

For each call, answer with a JSON object with the function's name and arguments:
<tool_call>
{{"name": ..., "arguments": ...}}
</tool_call>"""


def fit(
    template: ChatTemplate, messages: list[Message], tools: list[Message] | None
) -> tuple[list[Message], list[Message] | None, list[str]]:
    """Messages and tools as the template can show them, and which notes apply. The input is not changed."""
    notes = []
    if tools and not template.reads_variable("tools"):
        messages = _with_tools(messages, tools)
        tools = None
        notes.append(TOOLS_AS_TEXT)
    if any("tool_calls" in m for m in messages) and not template.reads_key("tool_calls"):
        messages = [_calls_as_text(m) if "tool_calls" in m else m for m in messages]
        notes.append(CALLS_AS_TEXT)
    if any("reasoning_content" in m for m in messages):
        if template.reads_key("reasoning_content"):
            pass
        elif template.reads_key("thinking"):
            messages = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
        else:
            messages = [_reasoning_as_text(m) if "reasoning_content" in m else m for m in messages]
            notes.append(REASONING_AS_TEXT)
    return messages, tools, notes


def _with_tools(messages: list[Message], tools: list[Message]) -> list[Message]:
    text = _TOOLS.format("\n".join(_dump(tool) for tool in tools))
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calls_as_text(message: Message) -> Message:
    calls = [f"<tool_call>\n{_dump(call['function'])}\n</tool_call>" for call in message["tool_calls"]]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"], *calls] if message["content"] else calls)}


def _reasoning_as_text(message: Message) -> Message:
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"}


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()
