"""Where the assistant speaks in a rendered conversation: from its first character to the end of its end token.

Two sources. A template with ``{% generation %}`` says so itself. Otherwise *prefixes* are compared: what the model sees
when it must speak (the turns before, with the generation prompt) must be how the whole conversation begins, and so must
the conversation up to and including the turn; the turn is the difference. Where they do not agree, training would show
the model something else than use does, and `Disagreement` says what.

Rendering every prefix costs time quadratic in the number of turns. `Labeller` therefore first looks for the turns in
one rendering: if the generation prompt occurs exactly once per assistant turn, and each occurrence is followed by the
turn's content (or that content trimmed) and the end token, then these are the only places where the prefixes can end.
What that does not show, that earlier turns are rendered alike when fewer turns follow, is compared in full for the
first conversations of each shape (system turn, tools, roles, several turns) and for every 128th after them. Whatever is
not so plain (reasoning, tool calls, marked-up content) always takes the full comparison. Of the same conversations the
labels are decoded once they are tokens (`decoded`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from headway.data.formats import Chat
from headway.data.templates import ChatTemplate, Message
from headway.data.turns import BadRecord

Span = tuple[int, int]

_FIRST_OF_SHAPE = 4
_ONE_IN = 128
_CHECKED_TURNS = 16

NO_END_TOKEN = "no_end_token"
END_ADDED = "generation_end_added"
NOT_RENDERED = "content_not_rendered"
NO_ASSISTANT = "no_assistant_turn"

#: What the counts in the manifest's ``notes`` mean.
NOTES = {
    NO_END_TOKEN: "the template writes no end token after the answer, so the model will not learn to stop",
    END_ADDED: "the template's generation block leaves out the end token; it was added to the labels",
    NOT_RENDERED: "the template leaves out some of the text of a turn",
    NO_ASSISTANT: "no assistant turn, so nothing to learn",
}


class Disagreement(Exception):
    """The template renders the beginning of a conversation differently depending on what follows."""


@dataclass
class Labeller:
    """Renders conversations and finds the spans to train. Keeps counts in ``notes``.

    ``added_tokens``: the texts of the tokenizer's added tokens, among which the end token is found. ``labels``: train
    every assistant turn, or the last.
    """

    template: ChatTemplate
    added_tokens: Iterable[str]
    labels: Literal["all", "last"] = "all"
    notes: Counter[str] = field(default_factory=Counter)
    prompt: str = field(init=False, default="")  # what makes the assistant speak, e.g. <|im_start|>assistant\n
    lead: str = field(init=False, default="")  # between that and the content, mostly nothing
    close: str = field(init=False, default="")  # from the content's end to the end of the end token
    end: str = field(init=False, default="")  # the end token
    due: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        longest_first = sorted(set(self.added_tokens), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._seen: Counter[tuple] = Counter()
        self._probe()

    @property
    def source(self) -> str:
        """Where label spans come from: "generation" or "prefix"."""
        return "generation" if self.template.has_generation else "prefix"

    def label(self, chat: Chat) -> tuple[str, list[Span]]:
        """The rendered conversation and its trained spans, as character positions [start, stop), in order.

        ``due`` says afterwards whether it was one of those that are compared in full.

        Raises:
            BadRecord: the template refuses the conversation.
            Disagreement: prefixes do not agree; the message shows the difference.
        """
        messages, tools = chat.messages, chat.tools
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = turns[-1:] if self.labels == "last" else turns
        self.due = self._is_due(chat, turns)
        if self.template.has_generation:
            text, spans = self.template.render_generation(messages, tools)
            by_turn = self._from_blocks(chat, text, spans, turns, wanted)
        else:
            text = self.template.render(messages, tools)
            by_turn = self._from_prefixes(chat, text, turns, wanted)
        if not turns:
            self.notes[NO_ASSISTANT] += 1
        return text, [span for turn, span in by_turn if turn is None or chat.trained[turn]]

    # -- prefixes ------------------------------------------------------------------------------------------------

    def _from_prefixes(
        self, chat: Chat, text: str, turns: list[int], wanted: list[int]
    ) -> list[tuple[int | None, Span]]:
        found = self.look_for_turns(chat.messages, text, turns)
        if found is None:
            spans = [self.by_prefix(chat, text, turn) for turn in wanted]
            self.notes[NOT_RENDERED] += any(m["content"].strip() not in text for m in chat.messages)
            return list(zip(wanted, spans, strict=True))
        spans = found[-len(wanted) :] if wanted else []
        if self.due:
            for turn, span in some(list(zip(wanted, spans, strict=True))):
                compared = self.by_prefix(chat, text, turn)
                if compared != span:
                    raise Disagreement(_difference(turn, text[slice(*compared)], text[slice(*span)]))
        return list(zip(wanted, spans, strict=True))

    def look_for_turns(self, messages: list[Message], text: str, turns: list[int]) -> list[Span] | None:
        """The span of every assistant turn, when one rendering shows them beyond doubt; else None."""
        prompt = self.prompt
        # "</think" marks templates' favourite thing to strip from earlier turns.
        if not prompt or not self.end or "</think" in text or text.count(prompt) != len(turns) or turns[:1] == [0]:
            return None
        spans: list[Span] = []
        at = 0
        for turn in turns:
            message = messages[turn]
            if len(message) != 2:  # more than role and content: reasoning, tool calls, a name
                return None
            start = text.index(prompt, at) + len(prompt)
            answer = f"{self.lead}{message['content']}{self.close}"
            if not text.startswith(answer, start):
                answer = f"{self.lead}{message['content'].strip()}{self.close}"
                if not text.startswith(answer, start):
                    return None
            at = start + len(answer)
            spans.append((start, at))
        return spans

    def by_prefix(self, chat: Chat, text: str, turn: int) -> Span:
        """The span of one assistant turn, by rendering what precedes it and what it completes.

        Raises:
            BadRecord, Disagreement: see `label`.
        """
        messages, tools = chat.messages, chat.tools
        if turn == 0:
            return self._opening(text, messages)
        before = self.template.render(messages[:turn], tools, prompt=True)
        upto = self.template.render(messages[: turn + 1], tools) if turn + 1 < len(messages) else text
        if not upto.startswith(before):
            raise Disagreement(_difference(turn, before, upto))
        stop = self._end_of_turn(upto, len(before))
        if not text.startswith(upto[:stop]):
            raise Disagreement(_difference(turn, upto[:stop], text))
        return len(before), stop

    def _opening(self, text: str, messages: list[Message]) -> Span:
        """The span of an assistant turn that opens the conversation: nothing precedes it that could be rendered."""
        content = messages[0]["content"].strip()
        at = text.find(self.prompt + content) if self.prompt else -1
        if at < 0:
            raise BadRecord("it opens with an assistant turn, which the chat template cannot prompt for")
        start = at + len(self.prompt)
        stop = text.find(self.end, start + len(content)) if self.end else -1
        return start, stop + len(self.end) if stop >= 0 else start + len(content)

    def _end_of_turn(self, upto: str, start: int) -> int:
        """Where the end token of the turn that begins at ``start`` ends; ``upto`` holds nothing after the turn."""
        at = upto.rfind(self.end, start) if self.end else -1
        if at >= 0:
            return at + len(self.end)
        ends = [match.end() for match in self._added.finditer(upto, start)]
        if ends:
            return ends[-1]
        self.notes[NO_END_TOKEN] += 1
        return start + len(upto[start:].rstrip())

    def _is_due(self, chat: Chat, turns: list[int]) -> bool:
        """Whether this conversation is one of those compared in full."""
        roles = frozenset(message["role"] for message in chat.messages)
        shape = (bool(chat.tools), chat.messages[0]["role"], len(turns) > 1, chat.messages[-1]["role"], roles)
        self._seen[shape] += 1
        return self._seen[shape] <= _FIRST_OF_SHAPE or self._seen[shape] % _ONE_IN == 0

    # -- {% generation %} ----------------------------------------------------------------------------------------

    def _from_blocks(
        self, chat: Chat, text: str, spans: list[Span], turns: list[int], wanted: list[int]
    ) -> list[tuple[int | None, Span]]:
        spans = [self._with_end(text, span) for span in spans]
        if len(spans) == len(turns):
            for turn, (start, stop) in zip(turns, spans, strict=True):
                content = chat.messages[turn]["content"].strip()
                # A block inside a macro or a captured block is reported at the wrong place.
                if len(chat.messages[turn]) == 2 and content not in text[start:stop]:
                    raise Disagreement(_difference(turn, content, text[start:stop]))
            return [(turn, span) for turn, span in zip(turns, spans, strict=True) if turn >= wanted[0]]
        if self.labels == "all" and all(chat.trained[turn] for turn in turns):
            return [(None, span) for span in spans]
        before = self.template.render(chat.messages[: wanted[-1]], chat.tools, prompt=True) if wanted else ""
        if not wanted or self.labels == "all" or not text.startswith(before):
            raise BadRecord(f"the template marks {len(spans)} generation blocks for {len(turns)} assistant turns")
        return [(wanted[-1], span) for span in spans if span[0] >= len(before)]

    def _with_end(self, text: str, span: Span) -> Span:
        start, stop = span
        if not self.end:
            return span
        if text.startswith(self.end, stop):
            self.notes[END_ADDED] += 1
            return start, stop + len(self.end)
        body = text[start:stop].rstrip()
        return (start, start + len(body)) if body.endswith(self.end) else span

    # -- probe ---------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Find the generation prompt and the end token, from a conversation of one letter each.

        What is not found stays "": then every conversation is compared in full.
        """
        asked: list[Message] = [{"role": "user", "content": "x"}]
        try:
            plain = self.template.render(asked, None)
            prompted = self.template.render(asked, None, prompt=True)
            answered = self.template.render([*asked, {"role": "assistant", "content": "y"}], None)
        except BadRecord:
            return  # a template that wants a system turn, say
        if prompted.startswith(plain):
            self.prompt = prompted[len(plain) :]
        # Without a generation prompt, what ends the user's turn makes the assistant speak.
        self.prompt = self.prompt or prompted[prompted.rfind("x") + 1 :]
        at = answered.find("y", len(prompted))
        if at < 0 or not answered.startswith(prompted):
            return
        self.lead = answered[len(prompted) : at]
        end = self._added.search(answered, at + 1)
        if end:
            self.end, self.close = end.group(), answered[at + 1 : end.end()]


def some(items: list) -> list:
    """All of a few; else the first, the last and some between, so that one long conversation stays cheap to check."""
    if len(items) <= _CHECKED_TURNS:
        return items
    edge, middle = _CHECKED_TURNS // 4, _CHECKED_TURNS // 2
    step = (len(items) - 2 * edge) / middle
    return items[:edge] + [items[edge + int(i * step)] for i in range(middle)] + items[-edge:]


def _difference(turn: int, expected: str, found: str) -> str:
    """Turn and surroundings of the first character in which two renderings differ, on one line."""
    shorter = min(len(expected), len(found))
    at = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    start = max(0, at - 40)
    return (
        f"turn {turn + 1}: {expected[start : at + 40]!r} when it is the last turn, "
        f"{found[start : at + 40]!r} when more turns follow"
    )
