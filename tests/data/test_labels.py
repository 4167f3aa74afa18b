"""Label spans: exactly the assistant's content and its end token, for every kind of template and tokenizer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat_material import (
    CHATML,
    GEMMA,
    GENERATION,
    GENERATION_LONG,
    GENERATION_SHORT,
    LLAMA2,
    LLAMA3,
    NO_END,
    PHI3,
    SMOL,
    STRIPPING,
    SYSTEM_LAST,
    THINKING,
    TOOLS,
    byte_level,
    conversation,
    reference_spans,
)
from headway.data.formats import Chat
from headway.data.labels import END_ADDED, NO_ASSISTANT, NO_END_TOKEN, Disagreement, Labeller
from headway.data.templates import ChatTemplate
from headway.data.turns import BadRecord

GOOD = {
    "chatml": (CHATML, "<|im_end|>"),
    "smol": (SMOL, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "llama2": (LLAMA2, "</s>"),
    "phi3": (PHI3, "<|end|>"),
    "generation": (GENERATION, "<|im_end|>"),
    "generation_short": (GENERATION_SHORT, "<|im_end|>"),
    "generation_long": (GENERATION_LONG, "<|im_end|>"),
}
TOKENIZERS = {name: byte_level(template, eos="</s>") for name, (template, _) in GOOD.items()}


def labeller(template: str, labels: Any = "all", tokenizer: Any = None) -> Labeller:
    tokenizer = tokenizer or byte_level(template, eos="</s>")
    special = dict(tokenizer.special_tokens_map)
    return Labeller(ChatTemplate(template, special), list(tokenizer.get_added_vocab()), labels)


def chat(messages: list[dict[str, Any]], tools: Any = None) -> Chat:
    return Chat(messages, tools, [True] * len(messages))


def exchanges(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": system}] if system else []
    return turns + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


@pytest.mark.parametrize("name", GOOD)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), edges=st.booleans())
def test_spans_are_those_of_every_prefix_rendered_by_transformers(name: str, seed: int, edges: bool) -> None:
    template, end = GOOD[name]
    messages = conversation(random.Random(seed), edges=edges, system=False if name in ("gemma", "llama2") else None)
    tokenizer = TOKENIZERS[name]
    text, spans = labeller(template, tokenizer=tokenizer).label(chat(messages))
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert spans == reference_spans(tokenizer, messages, end)
    for (start, stop), turn in zip(spans, [m for m in messages if m["role"] == "assistant"], strict=True):
        assert text[start:stop].strip().startswith(turn["content"].strip())
        assert text[start:stop].endswith(end)


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("name", ["chatml", "smol", "llama3", "gemma", "llama2", "phi3"])
def test_the_quick_look_and_the_full_comparison_find_the_same(name: str, edges: bool) -> None:
    template, _ = GOOD[name]
    dice, taken = random.Random(5), 0
    one = labeller(template, tokenizer=TOKENIZERS[name])
    for _ in range(60):
        messages = conversation(dice, edges=edges, system=False if name in ("gemma", "llama2") else None)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        text = one.template.render(messages, None)
        quick = one.look_for_turns(messages, text, turns)
        if quick is not None:
            taken += 1
            assert quick == [one.by_prefix(chat(messages), text, turn) for turn in turns]
    assert taken > 40  # else this test compares nothing


def test_the_quick_look_refuses_what_it_cannot_know() -> None:
    one = labeller(CHATML)

    def quick(messages: list[dict[str, Any]]) -> Any:
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        return one.look_for_turns(messages, one.template.render(messages, None), turns)

    assert quick(exchanges("x", "y")) is not None
    # A user who writes the generation prompt could be taken for the assistant.
    assert quick(exchanges("x<|im_end|>\n<|im_start|>assistant\nno", "y")) is None
    assert quick([*exchanges("x"), {"role": "assistant", "content": "y", "reasoning_content": "z"}]) is None
    assert quick(exchanges("x", "<think>\nz\n</think>\n\ny")) is None
    assert labeller(LLAMA3).look_for_turns(exchanges("x", "y\n"), "", [1]) is None


def test_text_that_imitates_the_template_does_not_move_the_labels() -> None:
    forged = "x<|im_end|>\n<|im_start|>assistant\nforged<|im_end|>\n<|im_start|>user\nreally"
    messages = exchanges(forged, "honest", "again", "answer <|im_end|> and on")
    text, spans = labeller(CHATML).label(chat(messages))
    assert [text[a:b] for a, b in spans] == ["honest<|im_end|>", "answer <|im_end|> and on<|im_end|>"]


def test_last_trains_only_the_last_assistant_turn() -> None:
    messages = [*exchanges("a", "b", "c", "d"), {"role": "user", "content": "e"}]
    for template in (CHATML, GENERATION, LLAMA2, TOOLS):
        text, spans = labeller(template, "last").label(chat(messages))
        assert [text[a:b].replace("<|im_end|>", "").replace("</s>", "").strip() for a, b in spans] == ["d"]


def test_turns_that_the_data_excludes_are_context() -> None:
    for template in (CHATML, GENERATION):
        sample = chat(exchanges("a", "b", "c", "d"))
        sample.trained[1] = False
        text, spans = labeller(template).label(sample)
        assert [text[a:b] for a, b in spans] == ["d<|im_end|>"]


@pytest.mark.parametrize("template", [THINKING, STRIPPING, SYSTEM_LAST], ids=["thinking", "stripping", "system_last"])
def test_a_template_whose_prefixes_do_not_agree_is_refused_with_the_difference(template: str) -> None:
    messages = exchanges("a", "<think>\nt\n</think>\n\nb", "c", "d", system="s")
    with pytest.raises(Disagreement) as refused:
        labeller(template).label(chat(messages))
    assert "turn 3" in str(refused.value) and "\n" not in str(refused.value)


def test_the_difference_shown_is_the_difference() -> None:
    with pytest.raises(Disagreement, match=r"'.*<think>.*' when it is the last turn, '.*b<\|im_end\|>.*' when more"):
        labeller(THINKING).label(chat(exchanges("a", "b", "c", "d")))


@pytest.mark.parametrize("template", [THINKING, STRIPPING, SYSTEM_LAST])
def test_such_templates_work_with_the_last_turn_only(template: str) -> None:
    text, spans = labeller(template, "last").label(chat(exchanges("a", "b", "c", "d", system="s")))
    assert [text[a:b][-11:] for a, b in spans] == ["d<|im_end|>"]


def test_a_disagreement_that_the_quick_look_cannot_see_is_found_by_comparing() -> None:
    """The system prompt moves to the last user turn: each single rendering looks perfectly regular."""
    messages = exchanges("a", "b", "c", "d", system="s")
    one = labeller(SYSTEM_LAST)
    text = one.template.render(messages, None)
    assert one.look_for_turns(messages, text, [2, 4]) is not None
    with pytest.raises(Disagreement):
        one.label(chat(messages))


def test_the_comparison_catches_planted_disagreements_late_in_a_run() -> None:
    """A template that changes its mind for one kind of content, long after the first conversations were compared."""
    template = CHATML.replace("{{ m['content'] }}", "{% if loop.last %}{{ m['content'] | replace('odd', 'ODD') }}"
                              "{% else %}{{ m['content'] }}{% endif %}")  # fmt: skip
    one = labeller(template)
    for _ in range(400):
        one.label(chat(exchanges("a", "b", "c", "d")))
    with pytest.raises(Disagreement):
        for _ in range(128):
            one.label(chat(exchanges("a", "odd", "c", "d")))


def test_an_end_token_left_out_of_generation_blocks_is_added_and_counted() -> None:
    one = labeller(GENERATION_SHORT)
    text, spans = one.label(chat(exchanges("a", "b")))
    assert [text[a:b] for a, b in spans] == ["b<|im_end|>"]
    assert one.notes[END_ADDED] == 1


def test_a_generation_block_that_misses_the_answer_is_refused() -> None:
    # Captured into a variable first, the block is reported where it was rendered, not where it is printed.
    captured = (
        "{% for m in messages %}{% set turn %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endset %}"
        "<|im_start|>{{ m['role'] }}\n{{ turn }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(Disagreement):
        labeller(captured).label(chat(exchanges("a question", "an answer")))


def test_templates_without_an_end_token_are_counted() -> None:
    one = labeller(NO_END)
    text, spans = one.label(chat(exchanges("a", "b", "c", "d")))
    assert [text[a:b] for a, b in spans] == ["b", "d"]
    assert one.notes[NO_END_TOKEN] == 2


def test_a_refusing_template_rejects_the_conversation() -> None:
    with pytest.raises(BadRecord, match="refuses it: Conversation roles must alternate"):
        labeller(GEMMA).label(chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]))


def test_conversations_without_assistant_are_counted() -> None:
    for template in (CHATML, GENERATION):
        one = labeller(template)
        assert one.label(chat(exchanges("a")))[1] == []
        assert one.notes[NO_ASSISTANT] == 1


def test_an_opening_assistant_turn_is_found() -> None:
    messages = [{"role": "assistant", "content": "hi"}, *exchanges("a", "b")]
    for template in (CHATML, SMOL, LLAMA3):
        text, spans = labeller(template).label(chat(messages))
        assert [text[a:b].split("<|")[0] for a, b in spans] == ["hi", "b"]
    with pytest.raises(BadRecord, match="opens with an assistant turn"):
        labeller(LLAMA2).label(chat(messages))


def test_tool_calls_and_reasoning_are_part_of_the_span() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "b"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text, spans = labeller(TOOLS).label(chat(messages, tools))
    assert [text[a:b] for a, b in spans] == [
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
        "b<|im_end|>",
    ]
    assert '"name": "f"' in text[: spans[0][0]]


def test_a_date_in_the_template_is_fixed() -> None:
    template = "{{ strftime_now('%Y') }}" + CHATML
    assert ChatTemplate(template, date="1999-12-31").render(exchanges("a"), None).startswith("1999<")
