"""The trees and the lines of the run folder are a contract: any change here must be a migration."""

from __future__ import annotations

import msgspec
import pytest

from golden_file import assert_golden
from headway.account import events
from headway.account.totals import Totals
from headway.account.tree import RUN, STEP
from headway.record.jsonl import VERSION

KINDS = [
    events.StepLine,
    events.RankLine,
    events.EvalLine,
    events.CheckpointLine,
    events.SessionStart,
    events.SessionEnd,
    events.Incident,
    events.Quarantined,
    events.Flops,
    Totals,
    events.TraceLine,
]


def describe(kind: type) -> dict[str, object]:
    info = msgspec.inspect.type_info(kind)
    return {
        field.encode_name: {"type": str(field.type), "required": field.required}
        for field in info.fields  # type: ignore[attr-defined]
    }


def test_schemas_are_frozen() -> None:
    assert_golden("record_schema.json", {"version": VERSION, **{kind.__name__: describe(kind) for kind in KINDS}})


def test_trees_are_frozen() -> None:
    assert_golden("trees.json", {tree.name: list(tree.paths()) for tree in (RUN, STEP)})


def test_every_category_has_a_meaning() -> None:
    for tree in (RUN, STEP):
        for path in tree.paths():
            assert path in tree.meanings or tree.children(path), f"{path} has no meaning"


def test_a_planted_change_of_schema_is_caught() -> None:
    class StepLine(msgspec.Struct):
        session: int

    with pytest.raises(AssertionError, match="needs a migration"):
        assert_golden("record_schema.json", {"version": VERSION, "StepLine": describe(StepLine)})
