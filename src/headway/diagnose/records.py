"""The events of a Chrome trace as typed records, decoded by msgspec straight from bytes, no dictionaries between."""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float
Text = str | int
# Values that writers put into `args` in more than one type; columns.py makes integers of them.
Loose = int | float | str | bool | list[Any] | dict[str, Any] | None


ABSENT = msgspec.Raw()
UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)


class Args(msgspec.Struct, gc=False, frozen=True, rename={"size": "bytes"}):
    """The arguments Headway uses; all others are skipped while decoding. -1 or None where absent.

    In the order in which Kineto writes them: msgspec looks for a key behind the one before it, and in another order a
    trace takes a quarter longer.
    """

    types: msgspec.Raw = msgspec.field(default=ABSENT, name="Input type")
    dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")
    device: Loose = -1
    stream: Loose = -1
    correlation: Loose = -1
    size: Loose = -1
    collective: Loose = msgspec.field(default=None, name="Collective name")
    elements: Loose = msgspec.field(default=None, name="In msg nelems")
    out_elements: Loose = msgspec.field(default=None, name="Out msg nelems")
    group: Loose = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Loose = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Loose = msgspec.field(default=None, name="Group size")
    dtype: Loose = None
    sequence: Loose = msgspec.field(default=None, name="Seq")


NO_ARGS = Args()


class Complete(msgspec.Struct, gc=False, kw_only=True, tag_field="ph", tag="X"):
    """A slice with a beginning and a duration, in microseconds. In the order in which Kineto writes the fields."""

    cat: str = ""
    name: str
    pid: Text = ""
    tid: Text = ""
    ts: Number
    dur: Number
    args: Args = NO_ARGS


class ThreadName(msgspec.Struct, gc=False):
    name: Loose = None


class Meta(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """Names of processes and threads."""

    name: str = ""
    pid: Text = ""
    tid: Text = ""
    args: ThreadName | None = None


class Begin(msgspec.Struct, gc=False, tag_field="ph", tag="B"):
    """Half of a slice written as two events."""


# Every other phase of the trace event format: decoded to an empty record, as cheap as an event can be.
_OTHERS = tuple(
    msgspec.defstruct(f"Other{number}", [], gc=False, tag_field="ph", tag=phase)
    for number, phase in enumerate("sftiICEbenNDOPpRcvV()STF")
)

AnyEvent: Any = Complete | Meta | Begin
for _other in _OTHERS:
    AnyEvent = AnyEvent | _other

decode_list = msgspec.json.Decoder(list[AnyEvent]).decode
decode_event = msgspec.json.Decoder(AnyEvent).decode
decode_args = msgspec.json.Decoder(Args).decode


class ExactTimes(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """The times of an event as the file writes them, for clocks that a float64 of microseconds cannot hold."""

    ts: msgspec.Raw
    dur: msgspec.Raw


ExactEvent: Any = ExactTimes | Meta | Begin
for _other in _OTHERS:
    ExactEvent = ExactEvent | _other

decode_exact_times = msgspec.json.Decoder(list[ExactEvent]).decode
