"""The model's own chat template, rendered as transformers renders it, and messages made to fit it.

The template runs in transformers' Jinja sandbox. Two things differ from `apply_chat_template`: the sandbox's answer to
"may this attribute be read?" is remembered (it depends on the type and the name only, and asking was half of the
rendering time), and the date a template may print is given, so that preparing the same data on two days gives the same
shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from headway.account.errors import UserError
from headway.data.turns import BadRecord

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template with what is fixed about its surroundings. Pickles as its source.

    ``special``: bos_token, eos_token… as the template sees them. ``options``: further variables (enable_thinking…).
    ``date``: what the template's ``strftime_now`` says, as YYYY-MM-DD.
    """

    source: str
    special: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    date: str = "2025-01-01"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("source", "special", "options", "date")}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    @cached_property
    def has_generation(self) -> bool:
        """Whether the template marks the assistant's text with ``{% generation %}``."""
        calls = (block.call.node for block in self._tree.find_all(jinja2.nodes.CallBlock))
        return any(getattr(called, "name", "") == "_generation_support" for called in calls)

    def reads_variable(self, name: str) -> bool:
        """Whether the template looks at a variable, e.g. ``tools``."""
        return name in self._variables

    def reads_key(self, name: str) -> bool:
        """Whether the template looks at a message's key, e.g. ``tool_calls``."""
        return name in self._keys

    def render(self, messages: list[Message], tools: list[Message] | None, *, prompt: bool = False) -> str:
        """The conversation as text; ``prompt`` adds what makes the assistant speak next.

        Raises:
            BadRecord: the template refuses the conversation (roles that do not alternate, a missing key…).
        """
        try:
            return self._template.render(self._context(messages, tools, prompt))
        except Exception as error:  # a template is a program: it can fail in any way
            raise BadRecord(f"the chat template refuses it: {_one_line(error)}") from None

    def render_generation(
        self, messages: list[Message], tools: list[Message] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, with the character spans of its ``{% generation %}`` blocks.

        Raises:
            BadRecord: the template refuses the conversation.
        """
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        # Of this environment's own extension: the method that transformers puts on the environment is that of the one
        # which ours was made from, and before 5.24 the two do not share what they track.
        extensions = self._template.environment.extensions.values()
        tracker: Any = next(each for each in extensions if hasattr(each, "activate_tracker"))
        try:
            with tracker.activate_tracker(blocks, spans):
                for block in self._template.generate(self._context(messages, tools, False)):
                    blocks.append(block)
                    # The tracker joins all blocks at each span: kept short, that is not quadratic in the turns.
                    if len(blocks) > 32:
                        blocks[:] = ["".join(blocks)]
        except Exception as error:  # a template is a program: it can fail in any way
            raise BadRecord(f"the chat template refuses it: {_one_line(error)}") from None
        return "".join(blocks), spans

    def _context(self, messages: list[Message], tools: list[Message] | None, prompt: bool) -> dict[str, Any]:
        return {
            **self.special,
            "strftime_now": datetime.fromisoformat(self.date).strftime,
            **self.options,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            environment: Any = _compile_jinja_template(self.source).environment.overlay()
            environment.is_safe_attribute = _remembered(environment.is_safe_attribute)
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template line {error.lineno}: {error.message}") from None

    @cached_property
    def _tree(self) -> jinja2.nodes.Template:
        return self._template.environment.parse(self.source)

    @cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset(jinja2.meta.find_undeclared_variables(self._tree))

    @cached_property
    def _keys(self) -> frozenset[str]:
        attributes = {node.attr for node in self._tree.find_all(jinja2.nodes.Getattr)}
        constants = {n.value for n in self._tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)}
        return frozenset(attributes | constants)


def _remembered(is_safe: Callable[[Any, str, Any], bool]) -> Callable[[Any, str, Any], bool]:
    known: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(obj: Any, attr: str, value: Any) -> bool:
        key = (type(obj), attr)
        answer = known.get(key)
        if answer is None:
            answer = known[key] = is_safe(obj, attr, value)
        return answer

    return is_safe_attribute


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
