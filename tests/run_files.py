"""Run files for this room's tests: the least that loads, a loader, and random valid configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.account.faults import FAULTS
from headway.config.load import LoadedRun, load_text
from headway.config.run import RunConfig
from headway.config.schema import Key, all_keys, members

HERE = Path("/files")
CWD = Path("/current")

LEAST = """\
model: {path: ./m}
data:
  sources: [a.jsonl]
  seq_len: 128
train:
  steps: 100
optim: {lr: 1e-5}
"""


def load(*overrides: str, text: str = LEAST, folder: Path = HERE, cwd: Path = CWD) -> LoadedRun:
    return load_text(text, overrides, label="run.yaml", folder=folder, name="run", cwd=cwd)


def config(*overrides: str, text: str = LEAST) -> RunConfig:
    return load(*overrides, text=text).config


def refusal(*overrides: str, text: str = LEAST) -> str:
    """The one line that a run file or override is refused with."""
    try:
        load(*overrides, text=text)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("it was accepted")


def without(pattern: str) -> str:
    """The least run file without the lines that match."""
    return "".join(line for line in LEAST.splitlines(keepends=True) if not re.search(pattern, line))


# Text that YAML 1.1 or 1.2 could take for something else, and ordinary text with every sign.
_TRAPS = st.sampled_from(
    ["", "null", "~", "no", "off", "Yes", "true", "1e-5", "1_000", "010", "0o7", "0x1F", "12:30", "2024-01-01", ".5",
     "<<", "=", "- a", "a: b", "a #b", "#a", "*a", "&a", "!a", "{a", "[a", "'", '"', "%a", "@a", "`a", "|", ">", " a ",
     "a\nb", "a\x85b", "a\u2028 b", "a\rb", "\ta", "é中🙂"]
)  # fmt: skip
_SIGNS = st.characters(exclude_categories=("Cs",))
TEXT = _TRAPS | st.text(_SIGNS, max_size=12)
SEGMENT = TEXT.map(lambda text: re.sub(r"[/\\\0\n]", "", text)).filter(lambda text: text.strip() not in {"", ".", ".."})
PATH = st.lists(SEGMENT, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FRACTION = st.floats(0, 0.5)
ALERT = st.fixed_dictionaries({"webhook": st.just("https://a/b")}) | st.fixed_dictionaries(
    {"command": st.lists(TEXT, max_size=2).map(lambda words: ["a", *words])},
    optional={"faults": st.lists(st.sampled_from(FAULTS), max_size=2)},
)
SOURCE = st.fixed_dictionaries({"path": PATH}, optional={"weight": st.floats(0.1, 9), "format": st.just("text")})


def _of_key(key: Key) -> st.SearchStrategy[Any]:
    """Values of a key by its type and limits, so that a new key is covered without a change here."""
    limits: dict[str, float] = {}
    for limit in [*key.field.metadata, *_limits_of_members(key.field.annotation)]:
        for name in ("ge", "gt", "le", "lt"):
            if hasattr(limit, name) and isinstance(limit, annotated_types.BaseMetadata):
                limits[name] = getattr(limit, name)
    options = [_of_type(part, limits, key) for part in members(key.field.annotation)]
    return st.one_of(options)


def _limits_of_members(annotation: Any) -> list[Any]:
    """Limits of one member of a union, as in `Literal["auto"] | Annotated[int, Field(ge=1)]`."""
    marked = [part for part in get_args(annotation) if get_origin(part) is Annotated]
    return [limit for part in marked for mark in part.__metadata__ for limit in getattr(mark, "metadata", [])]


def _of_type(kind: Any, limits: dict[str, float], key: Key) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        low = int(limits.get("ge", limits.get("gt", -1) + 1))
        return st.integers(low, int(limits.get("lt", 2**40)) - 1)
    if kind is float:
        low = limits.get("ge", limits.get("gt", -1e9))
        high = limits.get("le", limits.get("lt", 1e18))
        return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits)
    if kind is Path or key.marks.get("path"):
        return PATH
    if get_origin(kind) is list:
        item = get_args(kind)[0]
        if get_origin(item) is Literal:
            return st.lists(st.sampled_from(get_args(item)), max_size=3)
        return st.lists(TEXT, min_size=1, max_size=3)
    return TEXT


# Keys that depend on one another are drawn together in `raw_configs`.
_TOGETHER = {
    "version", "name", "out", "model.path", "model.config", "data.sources", "data.seq_len", "data.slots", "train.steps",
    "train.epochs", "train.tokens", "train.global_batch_tokens", "train.global_batch_sequences", "optim.betas",
    "schedule.warmup", "schedule.decay", "parallel.ranks", "parallel.fsdp", "parallel.tp", "parallel.pp", "parallel.cp",
    "parallel.ep", "checkpoint.allow", "eval.every", "eval.at_start", "eval.data", "eval.holdout", "alerts.to",
    *(key for key in all_keys() if key.startswith("checkpoint.remote.")),
}  # fmt: skip


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Nested raw values of a valid configuration."""
    flat: dict[str, Any] = {}
    for key in all_keys().values():
        if key.nested is None and "[]" not in key.name and key.name not in _TOGETHER and draw(st.booleans()):
            flat[key.name] = draw(_of_key(key))
    flat["name"], flat["out"] = draw(SEGMENT), draw(PATH)
    flat["data.sources"] = draw(st.lists(SOURCE, min_size=1, max_size=3))
    flat["data.seq_len"] = seq_len = draw(st.integers(2, 10_000))
    flat["data.slots"] = slots = seq_len + draw(st.integers(0, 1000))
    length = draw(st.sampled_from(["steps", "epochs", "tokens"]))
    flat[f"train.{length}"] = draw(st.integers(1, 10_000))
    unit = seq_len if flat.get("data.pack") == "none" else slots
    flat |= draw(st.sampled_from([{}, {"train.global_batch_tokens": 7 * unit}, {"train.global_batch_sequences": 3}]))
    flat["optim.lr"] = draw(st.floats(0, 1, exclude_min=True))
    flat["optim.betas"] = draw(st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)))
    flat["schedule.warmup"], flat["schedule.decay"] = draw(FRACTION), draw(FRACTION)
    flat |= draw(st.sampled_from([{}, {"parallel.ranks": flat.get("parallel.replicate", 1)}, {"parallel.fsdp": 2}]))
    held_out = st.sampled_from([{}, {"eval.holdout": 5, "eval.every": 3, "eval.at_start": True}]) | st.builds(
        lambda source: {"eval.data": [source], "eval.every": 9}, SOURCE
    )
    flat |= draw(held_out)
    flat |= draw(st.sampled_from([{}, {"checkpoint.remote.url": "s3://a/b", "checkpoint.remote.keep": 7}]))
    flat |= draw(st.sampled_from([{}, {"checkpoint.allow": ["seed", "optim"]}]))
    flat["alerts.to"] = draw(st.lists(ALERT, max_size=2))
    raw: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        inside = raw
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[last] = value
    raw.setdefault("model", {})
    if draw(st.booleans()):
        raw["model"]["config"] = draw(st.dictionaries(TEXT, FREE, max_size=3)) | {"model_type": "llama"}
    else:
        raw["model"]["path"] = draw(PATH)
    return raw
