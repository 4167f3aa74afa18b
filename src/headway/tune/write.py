"""RUN.tuned.yaml: the user's own text with settings put into it, each with a comment that says where it is from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml.nodes import CollectionNode, MappingNode, Node

from headway.account.errors import UserError
from headway.config.diff import config_diff
from headway.config.dump import inline
from headway.config.layers import EXCLUSIVE
from headway.config.load import load_text
from headway.config.overrides import override_layer
from headway.config.run import RunConfig
from headway.config.yaml_text import NULL, compose


@dataclass(frozen=True)
class Setting:
    """A dotted key, its plain value, and the comment that is written above it."""

    key: str
    value: Any
    comment: str


def tuned_path(run_file: Path) -> Path:
    """`run.yaml` -> `run.tuned.yaml`, beside it."""
    return run_file.with_name(f"{run_file.stem}.tuned{run_file.suffix}")


def own_name(config: RunConfig) -> Setting:
    """A name for the tuned run. Under the run file's own it would meet that run's folder and store, and be refused
    there for its packs, or go on from its checkpoints."""
    return Setting("name", f"{config.name}.tuned", f"tuned: a run of its own, beside {config.name}")


def given(overrides: Sequence[str], cwd: Path) -> list[Setting]:
    """Overrides as settings of a file: their relative paths, which start from `cwd`, are absolute."""
    layer = override_layer(overrides, cwd)
    return [Setting(each.key, each.value, "from the command line") for each in layer if not each.opens]


def as_overrides(settings: Iterable[Setting]) -> list[str]:
    """The same settings for the command line, the last of each key and of keys of which one counts."""
    lasting: dict[str, Setting] = {}
    for each in settings:
        for key in [each.key, *_alternatives(each)]:
            lasting.pop(key, None)
        lasting[each.key] = each
    return [f"{each.key}={inline(each.value)}" for each in lasting.values()]


def tuned_text(text: str, settings: Iterable[Setting]) -> str:
    """The text with settings put in, one after the other; everything else stays.

    Of keys of which one counts (`train.global_batch_tokens` and `…_sequences`), the others become comments. Raises
    UserError for a text that has no room for a setting.
    """
    text = text.removeprefix("\ufeff")  # a byte order mark counts only as the first character
    for each in settings:
        text = _set(text, each)
        for other in _alternatives(each):
            text = _without(text, other, f"# tuned: {each.key} is given instead of")
    return text


def why_not_the_same(text: str, proved: RunConfig, run_file: Path) -> str:
    """How a text, read as a run file beside `run_file`, differs from what was proved, under a name of its own; empty
    where it does not."""
    written, folder = tuned_path(run_file), run_file.resolve().parent
    proved = proved.model_copy(update={"name": own_name(proved).value})
    try:
        loaded = load_text(text, label=str(written), folder=folder, name=written.stem, cwd=Path.cwd()).config
    except UserError as error:
        return str(error)
    return "; ".join(str(each) for each in config_diff(proved, loaded))


def _alternatives(setting: Setting) -> list[str]:
    """Keys that cannot be given beside this one."""
    if setting.value is None or setting.value == 0:
        return []
    return [key for group in EXCLUSIVE if setting.key in group for key in group if key != setting.key]


@dataclass(frozen=True)
class _Place:
    """The innermost mapping that is there for a key, the key that opens it (None: the file), and the names left."""

    holder: MappingNode
    header: Node | None
    names: list[str]

    @property
    def key(self) -> Node | None:
        return next((key for key, _ in self.holder.value if key.value == self.names[0]), None)

    @property
    def value(self) -> Node | None:
        return next((value for key, value in self.holder.value if key.value == self.names[0]), None)


def _find(text: str, dotted: str) -> _Place:
    root = compose(text, lambda line: f"line {line}")
    if not isinstance(root, MappingNode):
        raise UserError("the run file is not a mapping")
    place = _Place(root, None, dotted.split("."))
    while len(place.names) > 1 and isinstance(place.value, MappingNode):
        place = _Place(place.value, place.key, place.names[1:])
    return place


def _set(text: str, setting: Setting) -> str:
    place = _find(text, setting.key)
    note = f"# {' '.join(setting.comment.split())}"
    key, old, inner = place.key, place.value, place.names[1:]
    if old is not None and inner and old.tag != NULL:
        raise UserError(f"line {old.start_mark.line + 1}: {setting.key} cannot be written into what is there")
    if place.holder.flow_style:
        return _set_in_flow(text, place, setting.value, f"{note} ({setting.key})")
    column = place.holder.value[0][0].start_mark.column
    if key is None or old is None:
        new = _lines(place.names, setting.value, note, column)
        if place.header is not None:
            # Under the section's own line: before its first key there may be a comment that belongs to that key.
            return _after_line(text, place.header.end_mark.index, new)
        end = place.holder.end_mark.index  # where `...` stands, if it does
        return f"{text[:end].rstrip()}\n\n{new}{text[end:]}"
    if inner:  # a section with nothing in it
        emptied = text[: old.start_mark.index].rstrip(" ") + text[_end(text, old) :]
        return _after_line(emptied, key.end_mark.index, _lines(inner, setting.value, note, column + 2))
    start, at = old.start_mark.index, _line_start(text, key.start_mark.index)
    gap = "" if start > key.end_mark.index + 1 else " "
    return f"{text[:at]}{' ' * column}{note}\n{text[at:start]}{gap}{inline(setting.value)}{text[_end(text, old) :]}"


def _set_in_flow(text: str, place: _Place, value: Any, note: str) -> str:
    """A mapping written as `{…}`: no room for a comment in it, so it goes above."""
    for name in reversed(place.names[1:]):
        value = {name: value}
    old = place.value
    if old is not None:
        start = old.start_mark.index
        gap = "" if text[start - 1].isspace() else " "
        text = f"{text[:start]}{gap}{inline(value)}{text[_end(text, old) :]}"
    else:
        brace = place.holder.start_mark.index + 1
        comma = ", " if place.holder.value else ""
        text = f"{text[:brace]}{inline(place.names[0])}: {inline(value)}{comma}{text[brace:]}"
    return _above(text, place, note)


def _without(text: str, dotted: str, why: str) -> str:
    """The key and its value as a comment."""
    place = _find(text, dotted)
    key, value = place.key, place.value
    if key is None or value is None or len(place.names) > 1 or value.tag == NULL:
        return text
    start, end = key.start_mark.index, _end(text, value)
    if not place.holder.flow_style:
        at, stop = _line_start(text, start), _line_end(text, end)
        indent = " " * key.start_mark.column
        lines = "".join(f"\n{indent}# {line.strip()}" for line in text[at:stop].splitlines())
        return f"{text[:at]}{indent}{why}:{lines}{text[stop:]}"
    was = " ".join(text[start:end].split())
    pairs = place.holder.value
    index = next(index for index, (each, _) in enumerate(pairs) if each is key)
    if index + 1 < len(pairs):
        end = pairs[index + 1][0].start_mark.index
    elif index:
        start = _end(text, pairs[index - 1][1])
    return _above(text[:start] + text[end:], place, f"{why}: {was}")


def _above(text: str, place: _Place, note: str) -> str:
    at = _line_start(text, place.holder.start_mark.index)
    return f"{text[:at]}{note}\n{text[at:]}"


def _lines(names: Sequence[str], value: Any, note: str, column: int) -> str:
    *outer, last = names
    deep = " " * (column + 2 * len(outer))
    opened = "".join(f"{' ' * (column + 2 * depth)}{inline(name)}:\n" for depth, name in enumerate(outer))
    return f"{opened}{deep}{note}\n{deep}{inline(last)}: {inline(value)}\n"


def _after_line(text: str, index: int, new: str) -> str:
    end = _line_end(text, index)
    return f"{text[:end]}\n{new}{text[end + 1 :]}"


def _end(text: str, node: Node) -> int:
    """Where a value's own text ends: behind a block's last value, not behind the comments that follow it."""
    if isinstance(node, CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    start = int(node.start_mark.index)
    return start + len(text[start : node.end_mark.index].rstrip())


def _line_start(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _line_end(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end
