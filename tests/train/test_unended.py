"""What a start says of a session that nobody was left to end."""

from __future__ import annotations

from types import SimpleNamespace as Any

from headway.record.sessions import History
from headway.train.unended import unended


def history(last: int, *, end: object = None, resumed_from: int = 0) -> History:
    steps = [Any(step=step, time=100.0 + step, wall_ns=int(2e9)) for step in range(resumed_from + 1, last + 1)]
    session = Any(start=Any(resumed_from=resumed_from, time=99.0), steps=steps, end=end)
    return History(sessions=[session])  # type: ignore[list-item]


def test_steps_behind_the_checkpoint_are_lost_with_the_seconds_that_they_took() -> None:
    assert unended(history(45), 3, []) == (45, 42, 84.0)
    assert unended(history(45), 45, []) == (45, 0, 0.0), "a death all the same"
    assert unended(history(3, resumed_from=3), 3, []) == (3, 0, 0.0)


def test_a_session_that_ended_or_whose_death_is_known_is_not_told_of() -> None:
    assert unended(History(), 0, []) is None
    assert unended(history(9, end=object()), 3, []) is None
    assert unended(history(9), 3, [109.5]) is None, "its supervisor wrote it down"
    assert unended(history(9), 3, [104.0]) == (9, 6, 12.0), "that was an earlier one"
