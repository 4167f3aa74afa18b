"""Damaged traces: every good event is kept, what was lost is counted, and never a traceback or a wrong sum."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.bench.diagnose_fuzz import WrongSum, check, fuzz, make_events, make_text
from headway.diagnose.facts import Damage, RankFacts
from headway.diagnose.job import Options, read_job

WHOLE = make_text(0)
KERNELS, EVENTS = 60, 120
GEMM = b'"gemm<{lambda()#1}, {x}>"'


def read(path: Path, text: bytes) -> RankFacts:
    path.write_bytes(text)
    return read_job([path], Options(window="gpu")).ranks[0]


def replaced(old: bytes, new: bytes, count: int = 1) -> Callable[[], bytes]:
    def damaged() -> bytes:
        assert old in WHOLE
        return WHOLE.replace(old, new, count)

    return damaged


# kind of damage, the text, events kept, how many lost and mended
KINDS: dict[str, tuple[Callable[[], bytes], int, int, int]] = {
    "nothing": (lambda: WHOLE, EVENTS, 0, 0),
    "byte_order_mark": (lambda: b"\xef\xbb\xbf" + WHOLE, EVENTS, 0, 0),
    "gzip_without_its_suffix": (lambda: gzip.compress(WHOLE), EVENTS, 0, 0),
    "bare_array": (lambda: json.dumps(make_events()).encode(), EVENTS, 0, 0),
    "trailing_comma_in_the_list": (lambda: WHOLE.replace(b"}}]", b"}},]"), EVENTS, 0, 0),
    "trailing_comma_in_an_event": (replaced(b'"dur": 5,', b'"dur": 5,,'), EVENTS - 1, 1, 0),
    "trailing_comma_in_arguments": (replaced(b'{"correlation": 3}', b'{"correlation": 3,}'), EVENTS, 0, 1),
    "raw_newline_in_a_name": (replaced(GEMM, b'"gemm\n<x>"'), EVENTS, 0, 1),
    "raw_newline_between_events": (lambda: WHOLE.replace(b"}}, {", b"}}\n,\n\n{"), EVENTS, 0, 0),
    "unescaped_quote": (replaced(GEMM, b'"gemm<"x">"'), EVENTS, 0, 1),
    "unescaped_backslash": (replaced(GEMM, rb'"C:\gemm\x"'), EVENTS, 0, 1),
    "backslash_before_the_closing_quote": (replaced(GEMM, b'"C:\\dir\\"'), EVENTS, 0, 1),
    "control_character": (replaced(GEMM, b'"ge\x01mm"'), EVENTS, 0, 1),
    "bad_encoding": (replaced(GEMM, b'"ge\xffmm"'), EVENTS, 0, 1),
    "infinite_argument": (replaced(b'"correlation": 3}', b'"correlation": 3, "bw": inf}'), EVENTS, 0, 1),
    "not_a_number_argument": (replaced(b'"correlation": 3}', b'"correlation": 3, "bw": NaN}'), EVENTS, 0, 1),
    "not_a_number_duration": (replaced(b'"dur": 20.25', b'"dur": nan'), EVENTS - 1, 1, 0),
    "integer_above_int64": (replaced(b'"correlation": 3}', b'"correlation": 99999999999999999999999}'), EVENTS, 0, 0),
    "time_as_text": (replaced(b'"ts": 1009.5', b'"ts": "1009.5"'), EVENTS, 0, 1),
    "negative_duration": (replaced(b'"dur": 20.25', b'"dur": -20.25'), EVENTS - 1, 1, 0),
    "impossible_duration": (replaced(b'"dur": 20.25', b'"dur": 9e14'), EVENTS - 1, 1, 0),
    "impossible_time": (replaced(b'"ts": 1009.5', b'"ts": 9e18'), EVENTS - 1, 1, 0),
    "no_phase": (replaced(b'"ph": "X", "cat": "kernel"', b'"cat": "kernel"'), EVENTS - 1, 1, 0),
    "garbage_between_events": (replaced(b"}}, {", b"}}, @#$ , {"), EVENTS - 1, 1, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_this_kind(kind: str, tmp_path: Path) -> None:
    make, kept, lost, mended = KINDS[kind]
    rank = read(tmp_path / "t.json", make())
    assert (rank.damage.kept, sum(rank.damage.lost.values())) == (kept, lost), rank.damage
    assert sum(rank.damage.mended.values()) == mended, rank.damage
    assert rank.damage.partial == bool(lost)
    names = Counter(name for _, _, name in ((0, 0, rank.names[i]) for i in rank.devices[0].events.name))
    assert sum(names.values()) >= KERNELS - 1


def test_kernels_at_time_zero_in_a_trace_of_today(tmp_path: Path) -> None:
    events = make_events()
    for event in events:
        event["ts"] += 1_790_857_026_000_000
    events[1]["ts"] = 0
    rank = read(tmp_path / "t.json", json.dumps({"traceEvents": events}).encode())
    assert rank.damage.lost == {"GPU events without a time": 1} and rank.devices[0].window.wall_ns < 10**7


@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_file_keeps_what_came_before(packed: bool, tmp_path: Path) -> None:
    text = gzip.compress(WHOLE) if packed else WHOLE
    rank = read(tmp_path / "t.json", text[: len(text) // 2])
    assert rank.damage.partial and rank.damage.truncated and 20 < rank.damage.kept < EVENTS
    check(rank, Counter(_original()), 0, "a cut")


def test_a_damaged_gzip_stream_keeps_what_came_before(tmp_path: Path) -> None:
    text = bytearray(gzip.compress(json.dumps({"traceEvents": make_events(4000)}).encode()))
    text[len(text) // 2] ^= 0xFF
    rank = read(tmp_path / "t.json", bytes(text))
    assert rank.damage.truncated and rank.damage.kept > 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "empty"),
        (b"hello", "not JSON"),
        (b"{}", "traceEvents"),
        (b'{"traceEvents": []}', "no events"),
        (b"[]", "no events"),
        (b"\xff\xfe[\x00", "UTF-16"),
        (gzip.compress(b""), "traceEvents"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": "X", "ts": "x"}]}', "can be read"),
    ],
    ids=["zero_bytes", "no_json", "no_list", "no_events", "empty_array", "utf_16", "empty_gzip", "nothing_readable"],
)
def test_what_holds_nothing_is_bad_input_with_a_clear_message(text: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        read(tmp_path / "t.json", text)


def test_launches_without_gpu_events_are_never_0_percent(tmp_path: Path) -> None:
    launches = [event for event in make_events() if event["cat"] == "cuda_runtime"]
    with pytest.raises(UserError, match="missing its GPU events"):
        read(tmp_path / "t.json", json.dumps(launches).encode())


def test_random_cuts_and_flips(tmp_path: Path) -> None:
    """`headway bench diagnose-fuzz` does the same for thousands."""
    found = fuzz(tmp_path, 120, seed=11)
    assert found.inputs == 120 and found.partial > 40 and found.refused < 40


def test_a_planted_wrong_sum_is_caught(tmp_path: Path) -> None:
    rank = read(tmp_path / "t.json", WHOLE)
    original = Counter(_original())
    check(rank, original, 0, "the whole trace")
    with pytest.raises(WrongSum, match="like none"):
        check(rank, original - Counter(_original()[:1]), 0, "an event that is not in the trace")
    events = rank.devices[0].events
    events.end[3] += 500  # the sums were made before
    with pytest.raises(WrongSum, match="busy"):
        check(rank, original, 1, "a sum that does not follow from the events")


def test_damage_is_partial_only_where_something_is_missing() -> None:
    assert not Damage(kept=5, mended={"trailing comma": 3}).partial
    assert Damage(kept=5, lost={"undecodable": 1}).partial and Damage(kept=5, truncated="cut").partial


def _original() -> list[tuple[int, int, str]]:
    from headway.bench.diagnose_fuzz import _kernels_of

    return _kernels_of(make_events())


def test_a_trace_without_any_host_event_is_accounted(tmp_path: Path) -> None:
    kernels = [event for event in make_events() if event["cat"] == "kernel"]
    device = read(tmp_path / "t.json", json.dumps(kernels).encode()).devices[0]
    assert device.shares.idle["unknown"] == device.shares.idle_ns > 0
