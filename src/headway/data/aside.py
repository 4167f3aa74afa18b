"""When a document is set aside, in epochs. It may come back after a release, and be set aside again.

What an epoch in progress was planned with must not change: it may be gone back to, and every position would be another.
So an epoch keeps a document set aside in it as padding, and only later ones are planned without it; and what was before
a release stays as it was.
"""

from __future__ import annotations

Key = tuple[int, int]
"""(number of the data source, document in it)"""

Spans = tuple[tuple[int, int], ...]
"""(epoch in which it was set aside, last epoch that does without it), oldest first, of one document."""

FOREVER = 2**62
"""The last epoch of a document that was not released."""


def set_aside(spans: Spans, epoch: int) -> Spans:
    """The same with the document set aside during ``epoch``. One that is aside stays so since it first was."""
    if spans and epoch <= spans[-1][1]:
        return (*spans[:-1], (spans[-1][0], FOREVER))
    return (*spans, (epoch, FOREVER))


def released(spans: Spans, epoch: int) -> Spans:
    """The same with the document back after ``epoch``."""
    return (*spans[:-1], (spans[-1][0], epoch))


def is_aside(spans: Spans) -> bool:
    """Whether it is so for good: no release is known."""
    return bool(spans) and spans[-1][1] == FOREVER


def is_left_out(spans: Spans, epoch: int) -> bool:
    """Whether an epoch is planned without the document."""
    return any(since < epoch <= until for since, until in spans)


def is_masked(spans: Spans, epoch: int) -> bool:
    """Whether an epoch has the document as padding, in its place."""
    return any(epoch <= until for _, until in spans) and not is_left_out(spans, epoch)
