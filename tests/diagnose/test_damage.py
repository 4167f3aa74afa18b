"""Damaged traces: never a traceback, never a sum that does not close."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.diagnose.job import read_job


def trace_text() -> bytes:
    events = []
    for step in range(60):
        at = 1000 + step * 50
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 1,
                "tid": 1,
                "ts": at,
                "dur": 5,
                "args": {"correlation": step},
            }
        )
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm<{lambda()#1}, {x}>",
                "pid": 0,
                "tid": 7,
                "ts": at + 9.5,
                "dur": 20.25,
                "args": {"correlation": step, "device": 0, "stream": 7},
            }
        )
    return json.dumps({"schemaVersion": 1, "traceEvents": events}, indent=1).encode()


def test_random_cuts_and_flips(tmp_path: Path) -> None:
    whole, rng, read = trace_text(), random.Random(4), 0
    for number in range(250):
        text = bytearray(whole[: rng.randrange(len(whole))] if number % 2 else whole)
        for _ in range(rng.randrange(4)):
            if text:
                text[rng.randrange(len(text))] = rng.randrange(256)
        path = tmp_path / "t.json"
        path.write_bytes(bytes(text))
        try:
            device = read_job([path]).ranks[0].devices[0]
        except UserError:
            continue
        read += 1
        assert device.shares.busy_ns + sum(device.shares.idle.values()) == device.shares.wall_ns
    assert read > 150


def test_a_cut_file_is_partial_and_an_empty_one_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(trace_text()[:6000])
    assert read_job([path]).partial
    path.write_bytes(b"")
    with pytest.raises(UserError, match="empty"):
        read_job([path])
