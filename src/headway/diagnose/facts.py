"""What a trace says, as plain data: the types that the reader fills and that findings are built on.

Times are integer nanoseconds on the trace's own clock (``RankFacts.base_ns`` makes it absolute). Event tables are
columns: numpy arrays of one length, row i is event i, sorted by start. A name is an index into ``RankFacts.names``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.account.account import Account
from headway.account.events import Flops

Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NONE = -1  # in a column: there is none


class GpuClass(IntEnum):
    """What a GPU event occupies. The account's shares are built from the unions of these three."""

    COMPUTE = 0
    COMM = 1
    MEM = 2


class HostKind(IntEnum):
    """What a host event is. Only these are kept; flows, instants and metadata are not."""

    OP = 0  # cpu_op: aten::…, autograd nodes, record_param_comms
    ANNOTATION = 1  # user_annotation: ProfilerStep#3, enumerate(DataLoader)…, Optimizer.step#…, nccl:all_reduce
    RUNTIME = 2  # cuda_runtime, cuda_driver, hip_runtime: launches and blocking calls
    PYTHON = 3  # python_function (with_stack)
    OVERHEAD = 4  # the profiler's own (buffer flush, instrumentation)


KINDS = (
    "matmul",
    "attention",
    "norm",
    "elementwise",
    "softmax",
    "loss",
    "optimizer",
    "embedding",
    "reduction",
    "convolution",
    "copy",
    "memset",
    "collective",
    "other",
)  # fmt: skip
"""Kinds of GPU events; ``GpuEvents.kind`` is an index into this tuple."""

IDLE_CLASSES = (
    "data",
    "blocking",
    "host",
    "launch_call",
    "launch_latency",
    "queued",
    "short",
    "unknown",
)  # fmt: skip
"""Why the device was idle, by what the launching thread did meanwhile (docs/diagnose.md defines each)."""


@dataclass(frozen=True)
class Damage:
    """What the reader had to leave out or mend. All zero for a clean file.

    `lost` counts events by reason (``undecodable``, ``no timestamp``, ``impossible duration``, …); `mended` counts
    events that were kept after a repair (``control character``, ``unescaped quote``, ``not a number``, …).
    """

    kept: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    mended: Mapping[str, int] = field(default_factory=dict)
    truncated: str = ""  # why the end of the file is missing; empty when it is whole

    @property
    def partial(self) -> bool:
        """Whether something is missing from the answer: exit code 3."""
        return bool(self.truncated or any(self.lost.values()))


@dataclass(frozen=True)
class Window:
    """The time an account covers, [start_ns, end_ns), and why these edges."""

    start_ns: int
    end_ns: int
    source: Literal["steps", "gpu", "host"]
    text: str

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Shares:
    """The closed split of a window; compute + exposed_comm + exposed_mem + idle == wall exactly, and so do the
    idle classes to idle. `comm_ns`, `mem_ns`, `overlap_ns` (communication under compute) are totals beside it."""

    wall_ns: int
    compute_ns: int
    exposed_comm_ns: int
    exposed_mem_ns: int
    idle_ns: int
    idle: Mapping[str, int]  # IDLE_CLASSES → ns
    comm_ns: int
    mem_ns: int
    overlap_ns: int

    def __post_init__(self) -> None:
        parts = self.compute_ns + self.exposed_comm_ns + self.exposed_mem_ns + self.idle_ns
        if parts != self.wall_ns:
            raise AssertionError(f"the shares sum to {parts} ns, the window is {self.wall_ns} ns")
        if sum(self.idle.values()) != self.idle_ns:
            raise AssertionError(f"the idle classes sum to {sum(self.idle.values())} ns, idle is {self.idle_ns} ns")

    @property
    def busy_ns(self) -> int:
        return self.wall_ns - self.idle_ns

    @property
    def utilisation(self) -> float:
        """Share of the window in which a kernel ran: what nvidia-smi would show, and not efficiency. 0 to 1."""
        return (self.compute_ns + self.exposed_comm_ns) / self.wall_ns if self.wall_ns else 0.0

    @property
    def overlap(self) -> float | None:
        """Share of communication that runs under compute, 0 to 1; None without communication."""
        return self.overlap_ns / self.comm_ns if self.comm_ns else None


@dataclass(frozen=True)
class GpuEvents:
    """GPU events of one device, sorted by start. All columns have length N."""

    start: Int64  # ns
    end: Int64  # ns, ≥ start
    name: Int32  # index into RankFacts.names
    klass: Int8  # GpuClass
    kind: Int8  # index into KINDS
    stream: Int32
    correlation: Int64  # NONE where absent
    launch: Int32  # row of RankFacts.host (a RUNTIME event) that launched it, NONE where the trace has none
    op: Int32  # row of RankFacts.host (the innermost OP open at the launch, on that thread), NONE where unknown
    size: Int64  # bytes of a copy, NONE where unknown

    def __len__(self) -> int:
        return len(self.start)

    @property
    def duration(self) -> Int64:
        return self.end - self.start


@dataclass(frozen=True)
class HostEvents:
    """Host events of one process, sorted by start (an enclosing event before what it holds). Length N."""

    start: Int64  # ns
    end: Int64  # ns
    name: Int32  # index into RankFacts.names
    kind: Int8  # HostKind
    thread: Int32  # index into RankFacts.threads
    correlation: Int64  # of RUNTIME events, NONE elsewhere
    shapes: Int32  # index into RankFacts.shapes of "Input Dims", NONE where not recorded
    types: Int32  # index into RankFacts.shapes of "Input type", NONE where not recorded

    def __len__(self) -> int:
        return len(self.start)

    @property
    def duration(self) -> Int64:
        return self.end - self.start


@dataclass(frozen=True)
class Collective:
    """One communication operation as one rank saw it."""

    rank: int
    device: int
    group: str  # the group's ranks or name, "" where the trace does not say
    name: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, …
    elements: int  # elements in the message, NONE where unknown
    sequence: int  # "Seq", NONE where absent
    start_ns: int
    end_ns: int
    event: int  # row of the device's GpuEvents (or of HostEvents on a CPU)
    dtype: str = ""
    group_size: int = NONE

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class KernelRow:
    """One name of the kernel table, inside the window."""

    name: str
    kind: str
    count: int
    total_ns: int
    median_ns: int
    share: float  # of the window's busy time summed over streams, 0 to 1


@dataclass(frozen=True)
class Fragmentation:
    """How finely the device's work is cut. `short` is < 10 µs. Shares are 0 to 1."""

    kernels: int
    kernels_per_step: float | None
    median_ns: int
    short_by_count: float
    short_by_time: float
    launch_bound: float  # share of the window idle in gaps < 100 µs that the next launch explains
    unlinked: int  # GPU events without a launch in the trace
    graph_kernels: int  # GPU events of launches that own several


@dataclass(frozen=True)
class StepRow:
    """One step of one device."""

    name: str
    start_ns: int
    end_ns: int
    shares: Shares
    kernels: int


@dataclass(frozen=True)
class Steps:
    """Complete steps only. Times in ns; `outliers` are indices into rows (over 1.5 × the median)."""

    rows: tuple[StepRow, ...] = ()
    median_ns: int = 0
    spread: float = 0.0  # (max - min) / median
    outliers: tuple[int, ...] = ()
    without_gpu: tuple[int, ...] = ()  # indices of steps without any GPU event


@dataclass(frozen=True)
class Efficiency:
    """FLOPs read from operator shapes or from a model, and what became of them. Shares 0 to 1.

    `mfu` is None where it would not mean anything; `why` then says so. `coverage` is the share of compute time whose
    FLOPs are known.
    """

    mfu: float | None
    hfu: float | None
    flops: Flops | None
    coverage: float
    tokens: int | None
    slots: int | None
    padding: float | None
    padding_is_hint: bool
    peak_text: str
    convention: str
    why: str = ""
    peak_flops: float | None = None  # FLOP/s of the device, where it is known


@dataclass(frozen=True)
class DeviceFacts:
    """One device over one window. On a trace without GPU work, `kind` is ``cpu`` and `events` are the operators."""

    kind: Literal["gpu", "cpu"]
    index: int
    name: str  # "NVIDIA H200"; "" where the trace does not say
    window: Window
    shares: Shares
    account: Account  # over the STEP tree
    events: GpuEvents  # all of the trace's, not only the window's
    phase: Int8  # [N], index into phases.PHASES, NONE where the trace does not tell
    table: tuple[KernelRow, ...]  # by time, longest first
    by_kind: Mapping[str, int]  # KINDS → ns, summed over streams inside the window
    fragmentation: Fragmentation
    steps: Steps
    collectives: tuple[Collective, ...]
    gaps: Gaps
    efficiency: Efficiency | None = None
    notes: tuple[str, ...] = ()  # what a reader must know: one event owns the window, kernels left over, …


@dataclass(frozen=True)
class Gaps:
    """Idle pieces of one device inside the window: columns of one length, sorted by start."""

    start: Int64
    end: Int64
    klass: Int8  # index into IDLE_CLASSES
    next_event: Int32  # row of GpuEvents that ended the gap, NONE at the window's end


@dataclass(frozen=True)
class RankFacts:
    """One trace file, read and accounted."""

    path: str
    rank: int
    rank_source: str  # "distributedInfo", "file name", "order"
    world_size: int | None
    base_ns: int  # add to every time to compare ranks
    devices: tuple[DeviceFacts, ...]
    host: HostEvents
    names: tuple[str, ...]
    threads: tuple[str, ...]  # "pid/tid name"
    shapes: tuple[str, ...]  # JSON text of "Input Dims" and "Input type", as in the trace
    damage: Damage
    metadata: Mapping[str, Any]  # the trace's own header: deviceProperties, distributedInfo, versions
    notes: tuple[str, ...] = ()

    def device(self) -> DeviceFacts:
        """The busiest device."""
        return max(self.devices, key=lambda device: device.shares.busy_ns)


@dataclass(frozen=True)
class MatchedCollective:
    """One collective over the ranks that took part. Columns of length R in the order of `ranks`, in ns on rank clocks
    brought together; `wait` = last arrival - own arrival, `transfer` = end - last arrival."""

    key: str
    name: str
    elements: int
    ranks: tuple[int, ...]
    arrival: Int64
    end: Int64
    last_rank: int

    @property
    def wait(self) -> Int64:
        return np.asarray(self.arrival.max() - self.arrival, np.int64)

    @property
    def transfer_ns(self) -> int:
        """From the last arrival to the first end."""
        return int(self.end.min() - self.arrival.max())


@dataclass(frozen=True)
class RankComparison:
    """All ranks of a job against each other. `refused` says why there is none."""

    matched: tuple[MatchedCollective, ...] = ()
    unmatched: int = 0
    last_arrivals: Mapping[int, int] = field(default_factory=dict)  # rank → how often it came last
    wait_ns: Mapping[int, int] = field(default_factory=dict)  # rank → time it waited for others, in collectives
    caused_ns: Mapping[int, int] = field(default_factory=dict)  # rank → exposed wait of the others it caused, mean
    offset_ns: Mapping[int, int] = field(default_factory=dict)  # rank → clock offset that was taken out
    transfer_ns: int = 0
    doing: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # late rank → what it did meanwhile, ns
    refused: str = ""


@dataclass(frozen=True)
class JobFacts:
    """Everything that was read: one file or all ranks of a job."""

    ranks: tuple[RankFacts, ...]
    comparison: RankComparison | None = None
    comm_names: tuple[str, ...] = ()  # kernel names that were counted as communication
    notes: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        return any(rank.damage.partial for rank in self.ranks)
