"""Records of every format, in the spellings found in the wild, become samples; what cannot is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.data.formats import Chat, Completion, Text, detect_format, parse_json, parse_record
from headway.data.turns import BadRecord


def chat(fmt: str, record: dict[str, Any]) -> Chat:
    sample = parse_record(fmt, record, chat_template=True)
    assert isinstance(sample, Chat)
    return sample


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("record", "fmt"),
    [
        ({"messages": turns(("user", "a"))}, "messages"),
        ({"conversations": turns(("user", "a"))}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"instruction": "a", "input": "", "output": "b", "text": "c"}, "alpaca"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": "a", "response": "b"}, "prompt_completion"),
        ({"text": "a", "id": 3}, "text"),
        ({"messages": []}, None),
        ({"chosen": "a", "rejected": "b"}, None),
        ([1], None),
    ],
)
def test_detects(record: Any, fmt: str | None) -> None:
    assert detect_format(record) == fmt


def test_messages_keep_system_tools_and_calls() -> None:
    sample = chat(
        "messages",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                },
                {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
                {"role": "assistant", "content": "c", "reasoning": "why", "weight": 0},
            ],
            "tools": [{"name": "f", "parameters": {}}],
        },
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "1"}
    assert sample.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "tool_calls": [call], "content": ""},
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": "c", "reasoning_content": "why"},
    ]
    assert sample.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert sample.trained == [True, True, True, True, False]


def test_older_spellings_of_function_calls() -> None:
    call = {"name": "f", "arguments": "not json"}
    sample = chat(
        "messages", {"messages": [{"role": "assistant", "function_call": call}], "functions": [{"name": "f"}]}
    )
    assert sample.messages[0]["tool_calls"][0]["function"] == call
    assert sample.tools == [{"type": "function", "function": {"name": "f"}}]


def test_parts_with_reasoning_and_tool_calls() -> None:
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "value": "so"},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ]
    (message,) = chat("messages", {"messages": [{"role": "assistant", "content": parts}]}).messages
    function = {"name": "f", "arguments": {"x": 1}}
    assert message == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": function}],
    }


def test_sharegpt() -> None:
    sample = chat(
        "sharegpt",
        {
            "system": "s",
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": '{"r": 1}'},
                {"from": "gpt", "value": "b"},
            ],
            "tools": '[{"name": "f"}]',
        },
    )
    assert [m["role"] for m in sample.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert sample.messages[3]["content"] == '{"r": 1}'
    assert sample.tools and len(sample.trained) == 5


def test_alpaca_with_and_without_a_template() -> None:
    record = {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["q", "a"]]}
    assert chat("alpaca", record).messages == turns(
        ("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "i\nx"), ("assistant", "o")
    )
    bare = parse_record("alpaca", {"instruction": "i", "input": "x", "output": "o"}, chat_template=False)
    assert isinstance(bare, Completion) and bare.completion == "o"
    assert bare.prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\ni\n\n### Input:\nx\n\n### Response:\n"
    )


def test_prompt_completion() -> None:
    assert parse_record("prompt_completion", {"prompt": "p", "response": "c"}, chat_template=True) == Completion(
        "p", "c"
    )
    both = chat(
        "prompt_completion",
        {"prompt": turns(("user", "a"), ("assistant", "b")), "completion": turns(("assistant", "c"))},
    )
    assert both.trained == [False, False, True]


def test_text() -> None:
    assert parse_record("text", {"text": "t"}, chat_template=True) == Text("t")


@pytest.mark.parametrize(
    ("fmt", "record", "reason"),
    [
        ("messages", [1], "not an object but a list"),
        ("messages", {"text": "x"}, "no key 'messages' or .*it has 'text'"),
        ("messages", {"messages": []}, "'messages' is an empty list"),
        ("messages", {"messages": "hi"}, "'messages' is a string"),
        ("messages", {"messages": ["hi"]}, r"messages\[1\]: not an object"),
        ("messages", {"messages": [{"content": "x"}]}, r"messages\[1\]: no 'role'"),
        (
            "messages",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]},
            r"\[2\]: the assistant turn",
        ),
        ("messages", {"messages": [{"role": "user", "content": 5}]}, "neither text nor a list"),
        ("messages", {"messages": turns(("user", "a"), ("assitant", "b"))}, "did you mean 'assistant'"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "no function name"),
        ("messages", {"messages": turns(("user", "a")), "tools": "{"}, "'tools' is text that is not JSON"),
        ("messages", {"messages": turns(("user", "a")), "tools": [1]}, "not a list of objects"),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            "'function_call' is text that is not",
        ),
        ("alpaca", {"instruction": "i"}, "no key 'output'"),
        ("alpaca", {"instruction": "i", "output": None}, "'output' is null"),
        ("alpaca", {"instruction": "i", "output": "o", "history": ["x"]}, "'history' is not a list of"),
        ("prompt_completion", {"prompt": "p"}, "no key 'response'"),
        ("text", {"text": 5}, "'text' is a number"),
        ("text", {}, "it is empty"),
    ],
)
def test_what_cannot_be_read_is_named(fmt: str, record: Any, reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        parse_record(fmt, record, chat_template=True)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [(b'{"a": \xff}', "not UTF-8: byte 0xff at offset 6"), (b"{", "not JSON"), (b'"\\ud800"', "not JSON")],
)
def test_bad_json_is_named(raw: bytes, reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        parse_json(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "from", "value", "tool_calls", "function", "name", "type", "text", "tools", "arguments"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@example("messages", "messages", [{"role": [], "content": None}], None)
@given(st.sampled_from(["messages", "sharegpt", "alpaca", "prompt_completion", "text"]), st.sampled_from(
    ["messages", "conversations", "instruction", "output", "prompt", "completion", "text"]), JSON, JSON)  # fmt: skip
def test_no_record_makes_the_reader_crash(fmt: str, key: str, value: Any, tools: Any) -> None:
    try:
        sample = parse_record(fmt, {key: value, "tools": tools, "output": "o", "system": value}, chat_template=True)
    except BadRecord:
        return
    if isinstance(sample, Chat):
        assert len(sample.trained) == len(sample.messages)
        assert all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in sample.messages)
        json.dumps(sample.messages)


def test_roles_in_other_letters_are_the_same_and_own_roles_are_kept() -> None:
    said = turns(("System", "s"), ("Human", "a"), ("GPT", "b"), ("critic", "c"), ("user_2", "d"))
    parsed = parse_record("messages", {"messages": said}, chat_template=True)
    assert [message["role"] for message in parsed.messages] == ["system", "user", "assistant", "critic", "user_2"]
