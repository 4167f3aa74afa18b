"""How fast traces are read: against plain decoding of the same bytes, and against HolisticTraceAnalysis beside it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from headway.account.errors import UserError

READERS = ("headway", "msgspec")
PEER = "hta"


@dataclass(frozen=True)
class Reading:
    """One reader's runs on one file: wall clock and CPU time in seconds, peak resident bytes of its process."""

    reader: str
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    resident: int

    def line(self, size: int) -> str:
        wall = "–".join(f"{value:.2f}" for value in (min(self.wall_s), float(np.median(self.wall_s)), max(self.wall_s)))
        cpu = float(np.median(self.cpu_s))
        return (
            f"{self.reader:<10}{wall:<20} s wall, {cpu:6.2f} s CPU ({size / 1e6 / cpu:,.0f} MB per CPU second), "
            f"{self.resident / 1e9:.2f} GB resident"
        )


@dataclass(frozen=True)
class Compared:
    """All readers on the same file, in turn."""

    path: str
    size: int
    readings: tuple[Reading, ...]

    def of(self, reader: str) -> Reading | None:
        return next((one for one in self.readings if one.reader == reader), None)

    def ratio(self, reader: str) -> float | None:
        """How many times the CPU time of Headway's reader this one takes, round by round, the median."""
        mine, other = self.of("headway"), self.of(reader)
        if mine is None or other is None:
            return None
        return float(np.median(np.array(other.cpu_s) / np.array(mine.cpu_s)))

    def lines(self) -> list[str]:
        text = [f"{self.path}: {self.size / 1e9:.3f} GB of JSON"]
        text += [one.line(self.size) for one in self.readings]
        for reader in (READERS[1], PEER):
            if (ratio := self.ratio(reader)) is not None:
                text.append(f"{reader} takes {ratio:.2f} × the CPU time of Headway's reader")
        return text

    def record(self) -> dict[str, object]:
        return {**asdict(self), "ratios": {reader: self.ratio(reader) for reader in (READERS[1], PEER)}}


def write_trace(path: Path, size: int) -> None:
    """A Kineto trace of about `size` bytes: operators with shapes, launches, kernels, flows, as PyTorch writes them."""
    rng = random.Random(4)
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],\n')
        file.write('  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n')
        written, first = 0, True
        for text in _operators(rng):
            file.write(text if first else ",\n" + text)
            first = False
            written += len(text) + 2
            if written >= size:
                break
        file.write("\n  ]\n}\n")


_NAMES = (
    ("aten::mm", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"),
    ("aten::mul", "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
     "BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> > > >"),
    ("aten::_log_softmax", "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>"),
    ("aten::copy_", "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"),
)  # fmt: skip


_FOUR = """\
  {{
    "ph": "X", "cat": "cpu_op", "name": "{op}", "pid": 432, "tid": 432,
    "ts": {at}, "dur": {took:.3f},
    "args": {{
      "External id": {n},"Record function id": 0, "Input type": ["c10::BFloat16", "c10::BFloat16"],
      "Input Dims": [[8192, 2560], [2560, 9728]], "Ev Idx": {n}
    }}
  }},
  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 432, "tid": 432,
    "ts": {call:.3f}, "dur": 3.125,
    "args": {{
      "External id": {n}, "cbid": 211, "correlation": {n}
    }}
  }},
  {{
    "ph": "s", "id": {n}, "pid": 432, "tid": 432, "ts": {call:.3f},
    "cat": "ac2g", "name": "ac2g"
  }},
  {{
    "ph": "X", "cat": "kernel", "name": "{kernel}", "pid": 0, "tid": 7,
    "ts": {start:.3f}, "dur": {took:.3f},
    "args": {{
      "External id": {n}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {n},
      "registers per thread": 168, "shared memory": 213984, "blocks per SM": 1.0, "warps per SM": 12.0,
      "grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 19
    }}
  }},
  {{
    "ph": "f", "id": {n}, "pid": 0, "tid": 7, "ts": {start:.3f},
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  }}"""


def _operators(rng: random.Random) -> Iterator[str]:
    """One operator at a time: its event, its launch, the flow between, and its kernel."""
    now, number = 5_134_819_478_279.794, 0
    while True:
        number += 1
        op, kernel = _NAMES[rng.randrange(len(_NAMES))]
        took = rng.uniform(4.0, 60.0)
        at = f"{now:.3f}"
        yield _FOUR.format(n=number, op=op, kernel=kernel, at=at, took=took, call=now + 2, start=now + 9)
        now += took


def compare(path: Path, rounds: int = 3, peer_python: str | None = None) -> Compared:
    """Every reader in turn, each time in a process of its own, so that peaks of memory are its own.

    Raises:
        UserError: a reader failed.
    """
    readers = [*READERS, *((PEER,) if peer_python else ())]
    wall: dict[str, list[float]] = {name: [] for name in readers}
    cpu: dict[str, list[float]] = {name: [] for name in readers}
    peak: dict[str, int] = dict.fromkeys(readers, 0)
    for _ in range(rounds):
        for name in readers:
            interpreter = peer_python if name == PEER and peer_python else sys.executable
            found = _one(interpreter, _PROGRAMS[name], path, name)
            wall[name].append(found["wall"])
            cpu[name].append(found["cpu"])
            peak[name] = max(peak[name], int(found["resident"]))
    readings = tuple(Reading(name, tuple(wall[name]), tuple(cpu[name]), peak[name]) for name in readers)
    return Compared(path.name, path.stat().st_size, readings)


def _one(interpreter: str, program: str, path: Path, name: str) -> dict[str, float]:
    done = subprocess.run([interpreter, "-c", program, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the reader {name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    value: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return value


# Imports are not timed; children's time counts. Resident is the most that it can have been: what processes share counts
# once for each of them.
_FRAME = """
import json, resource, sys, time
from pathlib import Path
path = Path(sys.argv[1])
workers = 1
{setup}
began, used = time.perf_counter(), time.process_time()
{work}
own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({{"wall": time.perf_counter() - began, "cpu": time.process_time() - used + children.ru_utime +
children.ru_stime, "resident": 1024 * (own.ru_maxrss + workers * children.ru_maxrss)}}))
"""
_PROGRAMS = {
    "headway": _FRAME.format(
        setup="""import numpy.ma
from headway.diagnose.decoding import worth
from headway.diagnose.job import read_job
workers = worth(path)""",
        work="read_job([path])",
    ),
    # The least that any reader of these records can do: the same stretches decoded and dropped, on one core.
    "msgspec": _FRAME.format(
        setup="""from headway.diagnose.piece import Piece
from headway.diagnose.records import UNDECODABLE, decode_list
from headway.diagnose.source import Source
from headway.diagnose.splitting import Splitter

class Decode:
    depth = 1

    def submit(self, stretch):
        return b"".join((b"[", b"".join(stretch).strip(b" \\t\\r\\n,"), b"]"))

    def result(self, text):
        try:
            decode_list(text)
        except UNDECODABLE:
            return None
        return Piece()""",
        work="for _ in Splitter(Source(path)).pieces(Decode()): pass",
    ),
    # Its own entry: parse, then the breakdown that it calls temporal.
    PEER: _FRAME.format(
        setup="import logging; logging.disable(logging.CRITICAL)\nfrom hta.trace_analysis import TraceAnalysis",
        work="""analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
analysis.get_temporal_breakdown(visualize=False)""",
    ),
}
