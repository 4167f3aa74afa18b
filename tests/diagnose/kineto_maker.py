"""Makes Kineto traces as PyTorch's profiler writes them: one host thread that launches, one device that works behind.

The host and the device have clocks of their own; a kernel starts when the device is free and its launch has arrived.
Times are µs.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOST, MAIN, BACKWARD = 100, 100, 101


class Kineto:
    """A trace of one rank, being made. `host_us`: what an operator costs the host."""

    def __init__(
        self, rank: int | None = None, world: int = 1, device: str = "NVIDIA H100 80GB HBM3", start: float = 1000.0
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = start
        self.free: dict[int, float] = {}
        self.correlation = 0
        self.rank, self.world, self.device = rank, world, device
        self.thread = MAIN
        self.sequence = 0

    def host_event(self, cat: str, name: str, start: float, dur: float, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": self.thread, "ts": start, "dur": dur,
             "args": {"External id": len(self.events) + 1, **args}}
        )  # fmt: skip

    def kernel(
        self, name: str, us: float, op: str = "aten::op", host_us: float = 4.0, stream: int = 7, cat: str = "kernel",
        shapes: Any = None, types: Any = None, call: str = "cudaLaunchKernel", **args: Any,
    ) -> None:  # fmt: skip
        """One operator that launches one kernel."""
        self.correlation += 1
        start = self.now
        described = {} if shapes is None else {"Input Dims": shapes, "Input type": types or []}
        self.host_event("cpu_op", op, start, host_us, **described)
        self.host_event("cuda_runtime", call, start + host_us * 0.4, host_us * 0.5, correlation=self.correlation)
        self.now = start + host_us
        begin = max(self.free.get(stream, 0.0), start + host_us * 0.9 + 1.0)
        self.free[stream] = begin + us
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": us,
             "args": {"device": 0, "stream": stream, "correlation": self.correlation, **args}}
        )  # fmt: skip

    def matmul(self, us: float = 400.0, **more: Any) -> None:
        types = more.pop("types", ["c10::BFloat16", "c10::BFloat16"])
        name = more.pop("name", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN")
        self.kernel(name, us, "aten::mm", shapes=[[8192, 2048], [2048, 2048]], types=types, **more)

    def flash(self, us: float = 300.0) -> None:
        self.kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", us, "aten::_flash_attention_forward")  # fmt: skip

    def elementwise(self, us: float = 20.0, **more: Any) -> None:
        name = "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16>>(int)"
        self.kernel(name, us, more.pop("op", "aten::mul"), **more)

    def triton(self, us: float = 40.0) -> None:
        self.kernel("triton_per_fused_add_mul_pow_0", us, "triton_per_fused_add_mul_pow_0")

    def host(self, us: float) -> None:
        """The host thinks."""
        self.now += us

    def wait(self, call: str = "cudaStreamSynchronize", after_us: float = 0.0, stream: int = 7) -> None:
        """The host waits for the device, and for `after_us` more."""
        until = max(self.now + 2.0, self.free.get(stream, 0.0)) + after_us
        self.host_event("cuda_runtime", call, self.now, until - self.now, correlation=0)
        self.now = until

    @contextmanager
    def annotated(self, name: str, cat: str = "user_annotation") -> Iterator[None]:
        start = self.now
        yield
        self.host_event(cat, name, start, self.now - start)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step; it ends when the device has done its work."""
        start = self.now
        yield
        self.now = max([self.now, *self.free.values()]) + 1.0
        self.host_event("user_annotation", f"ProfilerStep#{number}", start, self.now - start)

    def collective(
        self, name: str, elements: int, us: float, stream: int = 20, group: str = "0", ranks: int = 8, dtype: str = "BFloat16",
        after_compute: bool = False,
    ) -> None:  # fmt: skip
        """A NCCL kernel with its metadata, on a stream of its own; `after_compute`: it waits for the compute stream."""
        self.sequence += 1
        if after_compute:
            self.free[stream] = max(self.free.get(stream, 0.0), self.free.get(7, 0.0))
        size = {"Collective name": name, "In msg nelems": elements, "Out msg nelems": elements, "Group size": ranks,
                "dtype": dtype, "Process Group Name": group, "Seq": self.sequence,
                "Process Group Ranks": str(list(range(ranks)))}  # fmt: skip
        self.kernel(f"ncclDevKernel_{name}_RING_LL(ncclDevComm*)", us, f"c10d::{name}", stream=stream, **size)

    def after_collective(self, stream: int = 20) -> None:
        """Compute waits for the communication stream."""
        self.free[7] = max(self.free.get(7, 0.0), self.free.get(stream, 0.0))

    def to_dict(self) -> dict[str, Any]:
        header: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": self.device}],
            "baseTimeNanoseconds": 0,
            "displayTimeUnit": "ms",
        }
        if self.rank is not None:
            header["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": self.world}
        return {**header, "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict()).encode()
        path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
        return path


def clean_step(trace: Kineto, layers: int = 6) -> None:
    """A step with nothing to complain about: large products, fused attention and norms, fused optimizer."""
    for _ in range(layers):
        trace.matmul()
        trace.flash()
        trace.triton()
        trace.matmul()
    trace.kernel("_cce_lse_forward_kernel", 200.0, "linear_cross_entropy")
    trace.kernel("_cce_backward_kernel", 400.0, "linear_cross_entropy_backward")
    for _ in range(layers):
        trace.matmul(800.0)
        trace.kernel(
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", 500.0, "FlashAttentionBackward"
        )
    with trace.annotated("Optimizer.step#AdamW.step"):
        trace.kernel(
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "FusedOptimizerTensorListMetadata<4>>", 300.0, "aten::_fused_adamw_",
        )  # fmt: skip


def clean(steps: int = 4, **options: Any) -> Kineto:
    trace = Kineto(**options)
    for number in range(1, steps + 1):
        with trace.step(number):
            clean_step(trace)
    return trace
