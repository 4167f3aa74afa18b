"""What the run file says about data that is prepared already, against what its manifest says was done.

The keys that say how documents are read act when data is prepared. On a folder of shards they would do nothing, and the
run would claim labels, a template or a tokenizer that its documents do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from headway.account.errors import UserError
from headway.config.data import Source
from headway.config.run import RunConfig
from headway.data.inspect import TOKENIZER
from headway.data.job import templates_sha256
from headway.data.manifest import Manifest
from headway.data.store import DocumentStore, ShardFolder
from headway.data.templates import ChatTemplate
from headway.data.tokenizer import TokenizerInfo, open_tokenizer, read_template, take_apart

# One reader reads both.
_SAME_FORMAT = {"sharegpt": "messages"}


@dataclass(frozen=True)
class Prepared:
    """A source that was prepared before this run. ``key``: its place in the run file, as ``data.sources[0]``."""

    key: str
    source: Source
    store: DocumentStore

    def __str__(self) -> str:
        return f"{self.key} {self.source.path}"


def check_prepared(config: RunConfig, found: list[Prepared]) -> Iterator[str]:
    """Lines about defaults of the run file that do not hold for a source which was prepared in another way.

    Raises:
        UserError: a key that the run file sets contradicts how a source was prepared, or its tokenizer is another one.
    """
    shards = [(one, one.store) for one in found if isinstance(one.store, ShardFolder)]
    info = _tokenizer(config) if shards else None
    for one, store in shards:
        if info is not None:
            _check_tokenizer(one, store, info)
        elif store.manifest.tokenizer.sha256 != shards[0][1].manifest.tokenizer.sha256:
            raise UserError(f"{one}: made with another tokenizer than {shards[0][0]}; prepare both with the same one")
        yield from _labels(config, one, store.manifest)
        yield from _template(config, one, store.manifest, info)
        yield from _rejected(config, one, store.manifest)
        _check_format(one, store.manifest)
    for one in found:
        if not isinstance(one.store, ShardFolder):
            if one.source.format != "auto":
                raise UserError(
                    f"{one}: format {one.source.format} is set, and this holds tokens already; leave it out"
                )
            if config.data.labels != "all" or config.data.chat_template is not None:
                yield f"{one}: holds tokens without turns; data.labels and data.chat_template do nothing to it"


def _tokenizer(config: RunConfig) -> TokenizerInfo | None:
    given = config.model.tokenizer
    if given is None:
        return None
    return take_apart(open_tokenizer(given, trust_remote_code=config.model.trust_remote_code), given)


def _check_tokenizer(one: Prepared, store: ShardFolder, info: TokenizerInfo) -> None:
    record = store.manifest.tokenizer
    if record.sha256 != info.sha256:
        raise UserError(
            f"{one}: made with the tokenizer {record.path}, and model.tokenizer {info.path} is another one "
            f"({_difference(store, info)}); set model.tokenizer to the one it was made with, or prepare the data again"
        )


def _difference(store: ShardFolder, info: TokenizerInfo) -> str:
    stored = store.path / TOKENIZER
    if info.spec and stored.is_file():
        theirs, ours = _by_id(Tokenizer.from_file(str(stored))), _by_id(Tokenizer.from_str(info.spec))
        for number in sorted({*theirs, *ours}):
            there, here = theirs.get(number), ours.get(number)
            if there != here:
                return f"id {number} is {there!r} there, {here!r} here"
    return "the ids mean the same, its rules or special tokens do not"


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def _labels(config: RunConfig, one: Prepared, manifest: Manifest) -> Iterator[str]:
    made, wanted = manifest.options.get("labels", "all"), config.data.labels
    if manifest.template.labels == "none":  # no chat in it
        if wanted != "all":
            yield f"{one}: holds no chat, so data.labels: {wanted} does nothing to it"
    elif made != wanted:
        said = f"{one}: was prepared with labels {made}, and data.labels is {wanted}"
        if config.data.chose("labels"):
            raise UserError(f"{said}; set data.labels: {made}, or prepare the data again")
        yield f"{said} (default): labels stay {made}, as they were prepared"


def _template(config: RunConfig, one: Prepared, manifest: Manifest, info: TokenizerInfo | None) -> Iterator[str]:
    given = config.data.chat_template
    if manifest.template.labels == "none":
        if given is not None:
            yield f"{one}: holds no chat, so data.chat_template does nothing to it"
        return
    if given is None and info is None:
        return
    if given is not None:
        wanted = {"default": ChatTemplate(read_template(given))}
    else:
        assert info is not None
        wanted = {name: ChatTemplate(text) for name, text in info.templates.items()}
    if templates_sha256(wanted) == manifest.template.sha256:
        return
    made = manifest.template.source
    made = "the chat template of its tokenizer" if made == "tokenizer" else f"the chat template {made}"
    if given is not None:
        raise UserError(
            f"{one}: was prepared with {made}, and data.chat_template {given} is another one; "
            "leave data.chat_template out, or prepare the data again"
        )
    yield (
        f"{one}: was prepared with {made}, which is not that of model.tokenizer; the data stays as it is and the "
        "exported tokenizer keeps its own, so serve with the other one, or set data.chat_template to it"
    )


def _rejected(config: RunConfig, one: Prepared, manifest: Manifest) -> Iterator[str]:
    bad, records = manifest.totals.rejected, manifest.totals.rejected + manifest.totals.documents
    if bad > config.data.max_bad * records:
        said = f"{one}: {bad} of {records} records were bad ({bad / records:.1%}) when it was prepared"
        if config.data.chose("max_bad"):
            raise UserError(f"{said}, data.max_bad allows {config.data.max_bad:.1%}; mend the data, or raise it")
        yield f"{said}, more than data.max_bad {config.data.max_bad:.1%} (default) allows"


def _check_format(one: Prepared, manifest: Manifest) -> None:
    wanted = one.source.format
    for file in manifest.files if wanted != "auto" else []:
        read_as = _SAME_FORMAT.get(file.format, file.format)
        if file.totals.documents and read_as != _SAME_FORMAT.get(wanted, wanted):
            raise UserError(
                f"{one}: format {wanted} is set, and {file.path} was read as {file.format} when it was prepared; "
                "leave the format out, or prepare the data again"
            )
