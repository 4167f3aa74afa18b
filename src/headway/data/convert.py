"""Chunks of source -> tokenised documents. Runs in every worker, knows nothing of files and shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headway.account.errors import UserError
from headway.data import fit as fitting
from headway.data import labels as labelling
from headway.data.chunks import Chunk, records
from headway.data.decoded import difference
from headway.data.encode import Document, Encoded, Encoder
from headway.data.formats import Chat, Completion, parse_record
from headway.data.labels import Disagreement, Labeller
from headway.data.templates import ChatTemplate
from headway.data.tokenizer import TokenizerInfo
from headway.data.turns import STANDARD, BadRecord

#: Text tokenised in one call: enough to be fast, little enough that the tokenizer's own records stay small.
_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 1024

BOUNDARY_CUT = "boundary_cut"
NO_EOS = "no_eos_token"
UNKNOWN_ROLE = "unknown_role"

NOTES = {
    **fitting.NOTES,
    **labelling.NOTES,
    BOUNDARY_CUT: "a token would have spanned the edge of an answer; the text was tokenised in two parts there",
    NO_EOS: "the tokenizer has no end token, so texts and completions end without one",
    UNKNOWN_ROLE: "a role is none of system, user, assistant, tool, developer; its turns are never trained, and the "
    "template decides whether they are shown",
}


@dataclass(slots=True)
class Converted:
    """One record: its document, or the reason why there is none."""

    file: int
    line: int
    result: Encoded | BadRecord


@dataclass
class Converter:
    """Turns chunks into documents, in order. ``paths``: the source files, for messages."""

    info: TokenizerInfo
    encoder: Encoder
    templates: dict[str, ChatTemplate]
    labels: str
    text_eos: bool
    paths: list[str]
    notes: Counter[str] = field(default_factory=Counter)
    _labellers: dict[str, Labeller] = field(default_factory=dict)

    def convert(self, chunks: list[Chunk]) -> Iterator[Converted]:
        """Every record of the chunks, tokenised or rejected.

        Raises:
            UserError: a chat without a chat template, or a template whose prefixes do not agree.
        """
        held: list[Converted] = []
        documents: list[Document] = []
        size = 0
        for chunk in chunks:
            for line, record in records(chunk):
                try:
                    if isinstance(record, BadRecord):
                        raise record
                    document = self._document(chunk, line, record)
                except BadRecord as error:
                    held.append(Converted(chunk.file, line, error))
                    continue
                # The slot is filled in when the batch has been tokenised.
                held.append(Converted(chunk.file, line, _PENDING))
                documents.append(document)
                size += sum(map(len, document.pieces))
                if size >= _BATCH_CHARACTERS or len(documents) >= _BATCH_DOCUMENTS:
                    yield from self._finish(held, documents)
                    held, documents, size = [], [], 0
        yield from self._finish(held, documents)

    @property
    def label_source(self) -> str:
        """Where the label spans of chats came from: "generation", "prefix", or "none" as long as there was no chat."""
        return next((labeller.source for labeller in self._labellers.values()), "none")

    def _finish(self, held: list[Converted], documents: list[Document]) -> Iterator[Converted]:
        encoded, sent = iter(self.encoder.encode(documents) if documents else []), iter(documents)
        for item in held:
            if item.result is _PENDING:
                item.result, document = next(encoded), next(sent)
            if isinstance(item.result, Encoded):
                if document.check and (wrong := difference(document, item.result, self.encoder.decode)):
                    raise UserError(
                        f"{self.paths[item.file]}:{item.line}: the labels are wrong: {wrong}; with the tokenizer "
                        f"{self.info.path} Headway cannot tell where answers lie; report this with the record"
                    )
                self.notes[BOUNDARY_CUT] += bool(item.result.cut)
                if not len(item.result.ids):
                    item.result = BadRecord("the tokenizer makes no token of it")
            yield item

    def _document(self, chunk: Chunk, line: int, record: Any) -> Document:
        sample = parse_record(chunk.format, record, chat_template=bool(self.templates))
        if isinstance(sample, Chat):
            return self._chat(sample, chunk, line)
        if isinstance(sample, Completion):
            if not sample.completion and not self.info.eos_token:
                raise BadRecord("the completion is empty")
            pieces = [piece for piece in (sample.prompt, sample.completion) if piece]
            start, stop = len(sample.prompt), len(sample.prompt) + len(sample.completion)
            return Document(pieces, [(start, stop)], self.info.bos, self._end(sample.completion))
        if not sample.text:
            raise BadRecord("the text is empty")
        end = self._end(sample.text) if self.text_eos else ()
        return Document([sample.text], [(0, len(sample.text))], self.info.bos, end)

    def _end(self, text: str) -> tuple[int, ...]:
        """The end token to append: never a second one behind a text that ends with it."""
        if self.info.eos_token_id is None:
            self.notes[NO_EOS] += 1
            return ()
        return () if text.endswith(self.info.eos_token) else (self.info.eos_token_id,)

    def _chat(self, chat: Chat, chunk: Chunk, line: int) -> Document:
        where = f"{self.paths[chunk.file]}:{line}"
        if not self.templates:
            raise UserError(
                f"{where}: is a chat, and the tokenizer {self.info.path} has no chat template; "
                "set data.chat_template: PATH to a Jinja file"
            )
        self.notes[UNKNOWN_ROLE] += any(message["role"] not in STANDARD for message in chat.messages)
        labeller = self._labeller("tool_use" if chat.tools and "tool_use" in self.templates else "default")
        messages, tools, notes = fitting.fit(labeller.template, chat.messages, chat.tools)
        self.notes.update(notes)
        # A system turn that `fit` put in front is never trained.
        trained = [False] * (len(messages) - len(chat.messages)) + chat.trained
        try:
            text, spans = labeller.label(Chat(messages, tools, trained))
        except Disagreement as difference:
            raise UserError(
                f"{where}: the chat template renders a turn differently when it is the last one, so the text the model "
                f"must learn cannot be told: {difference}; set data.labels: last, or data.chat_template to a template "
                "with {% generation %} blocks"
            ) from None
        return Document([text], spans, check=labeller.due)

    def _labeller(self, name: str) -> Labeller:
        if name not in self._labellers:
            labels: Any = self.labels
            self._labellers[name] = Labeller(self.templates[name], self.info.added, labels, self.notes)
        return self._labellers[name]


_PENDING: Any = object()
