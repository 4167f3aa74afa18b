"""A trace for every cause: one that must trigger its finding, one that is like it and must not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from diagnose.kineto_maker import BACKWARD, Kineto, clean, clean_step

STEPS = range(1, 5)
EAGER = "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16>>(int)"


def each_step(work: Callable[[Kineto, int], None], **options: object) -> Kineto:
    trace = Kineto(**options)  # type: ignore[arg-type]
    for number in STEPS:
        with trace.step(number):
            work(trace, number)
    return trace


def fragmented() -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        for _ in range(6):
            trace.matmul(60.0)
            for _ in range(12):
                trace.elementwise(5.0, host_us=14.0)

    return each_step(work)  # fmt: skip


def unfused_but_busy() -> Kineto:
    """The queue is full, nothing is launch-bound, yet a third of the time moves bytes back and forth."""

    def work(trace: Kineto, _: int) -> None:
        for _ in range(6):
            trace.matmul(400.0)
            for _ in range(8):
                trace.elementwise(40.0)

    return each_step(work)  # fmt: skip


def few_elementwise() -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        trace.elementwise(30.0)

    return each_step(work)  # fmt: skip


def optimizer(kernel: str, op: str, count: int) -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        with trace.annotated("Optimizer.step#AdamW.step"):
            for _ in range(count):
                trace.kernel(kernel, 1200.0 / count, op)

    return each_step(work)  # fmt: skip


FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>, BinaryOp>"
)
FUSED = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>>"
)


def loss(vocabulary: int) -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        shapes, types = [[8192, vocabulary], [], []], ["float", "Scalar", "Scalar"]
        trace.kernel(
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", 90.0, "aten::copy_"
        )
        trace.kernel(
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>",
            240.0,
            "aten::_log_softmax",
            shapes=shapes,
            types=types,
        )
        trace.kernel("void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float>", 3.0, "aten::nll_loss_forward")
        trace.kernel(
            "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float>",
            250.0,
            "aten::_log_softmax_backward_data",
        )
        trace.kernel(
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", 90.0, "aten::copy_"
        )

    return each_step(work)  # fmt: skip


def eager_attention() -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        for _ in range(6):
            trace.matmul()
            trace.kernel("sm90_xmma_gemm_bf16", 120.0, "aten::bmm")
            trace.kernel(EAGER, 60.0, "aten::add")
            trace.kernel("void (anonymous namespace)::softmax_warp_forward<float>", 80.0, "aten::_softmax")
            trace.kernel("sm90_xmma_gemm_bf16", 120.0, "aten::bmm")

    return each_step(work)  # fmt: skip


def router_softmax() -> Kineto:
    """A mixture of experts' router also takes a softmax; it is tiny, and no attention."""

    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        for _ in range(6):
            trace.kernel("void (anonymous namespace)::softmax_warp_forward<float>", 3.0, "aten::_softmax")

    return each_step(work)  # fmt: skip


def large_softmax_beside_flash() -> Kineto:
    """Attention is fused; the large softmax is a sampler's or a router's."""

    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        for _ in range(6):
            trace.matmul()
            trace.kernel("void (anonymous namespace)::softmax_warp_forward<float>", 900.0, "aten::_softmax")
            trace.flash()

    return each_step(work)  # fmt: skip


CPU_SCORES = ("aten::bmm", "aten::_softmax", "aten::bmm", "aten::bmm", "aten::_softmax_backward_data", "aten::bmm")
CPU_LOSS = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::mm",
    "aten::_log_softmax",
    "aten::nll_loss_forward",
    "autograd::engine::evaluate_function: LogSoftmaxBackward0",
    "LogSoftmaxBackward0",
    "aten::_log_softmax_backward_data",
    "aten::fill_",
    "aten::mm",
)


def on_cpu(ops: Sequence[str]) -> Kineto:
    """Operators of a process without a device, 500 µs each."""

    def work(trace: Kineto, _: int) -> None:
        for name in ops:
            with trace.annotated(name, "cpu_op"):
                trace.host(500.0)

    return each_step(work)  # fmt: skip


def reads_every_layer() -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        for _ in range(6):
            trace.matmul(300.0)
            with trace.annotated("aten::item", "cpu_op"):
                trace.wait(after_us=60.0)
            trace.host(60.0)

    return each_step(work)  # fmt: skip


def reads_once_a_step() -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        with trace.annotated("aten::item", "cpu_op"):
            trace.wait()

    return each_step(work)  # fmt: skip


def frees(count: int) -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        for _ in range(count):
            trace.matmul(100.0)
            trace.wait("cudaFree", after_us=150.0)
            trace.matmul(100.0)

    return each_step(work)  # fmt: skip


def first_use() -> Kineto:
    """A trace from a process's first kernel on: the first cudaFree sets the device up, and no step has a name."""
    trace = Kineto()
    trace.elementwise(5.0)
    trace.wait("cudaFree", after_us=2_000_000.0)
    for _ in range(60):
        clean_step(trace)
    return trace


def loader(waits: list[float]) -> Kineto:
    def work(trace: Kineto, number: int) -> None:
        with trace.annotated("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            trace.host(waits[(number - 1) % len(waits)])
        clean_step(trace)

    trace = Kineto()
    for number in range(1, 9):
        with trace.step(number):
            work(trace, number)
    return trace  # fmt: skip


def gradients(us: float, hidden: bool) -> Kineto:
    """An all-reduce of the gradients: under backward, or after it."""

    def work(trace: Kineto, _: int) -> None:
        for _ in range(3):
            if hidden:
                trace.collective("all_reduce", 25_000_000, us / 3)
            for _ in range(6):
                trace.matmul(500.0)
        if not hidden:
            trace.collective("all_reduce", 75_000_000, us, after_compute=True)
        trace.after_collective()
        trace.kernel(FUSED, 200.0, "aten::_fused_adamw_")

    return each_step(work)  # fmt: skip


def small_messages(count: int, elements: int, us: float) -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace, 2)
        trace.collective("all_reduce", 50_000_000, 260.0)
        for _ in range(count):
            trace.collective("all_reduce", elements, us, after_compute=True)
        trace.after_collective()

    return each_step(work)  # fmt: skip


def heavy_plan(us: float) -> Kineto:
    """All-to-alls in every layer, longer than the layers."""

    def work(trace: Kineto, _: int) -> None:
        for _ in range(6):
            trace.matmul(300.0)
            trace.collective("all_to_all", 100_000_000, us, after_compute=True, group="ep")
            trace.after_collective()

    return each_step(work)  # fmt: skip


def link(us: float, ranks: int = 8) -> Kineto:
    """An all-reduce of 200 MB: 8 ranks at 450 GB/s take about 0.78 ms."""

    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        trace.collective("all_reduce", 100_000_000, us, after_compute=True, ranks=ranks)
        trace.after_collective()

    return each_step(work)  # fmt: skip


def pipeline(wait: float) -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        for micro in range(4):
            trace.collective("recv", 1_000_000, 30.0 + (wait if micro == 0 else 0.0), group="pp", ranks=2)
            trace.after_collective()
            clean_step(trace, 2)
        trace.collective("recv", 1_000_000, 30.0 + wait, group="pp", ranks=2, after_compute=True)
        trace.after_collective()

    return each_step(work)  # fmt: skip


def all_to_all(us: float) -> Kineto:
    """Experts' exchange as old traces show it: kernels of sends and receives, no metadata, the name on the host only."""

    def work(trace: Kineto, _: int) -> None:
        for _ in range(4):
            with trace.annotated("nccl:all_to_all"):
                trace.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", us, "c10d::x", stream=20)
            trace.after_collective()
            clean_step(trace, 2)

    return each_step(work)  # fmt: skip


def products(name: str, types: list[str]) -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        for _ in range(8):
            trace.matmul(600.0, name=name, types=types)

    return each_step(work, device="NVIDIA H200")  # fmt: skip


def recomputing(again: bool) -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        trace.thread = BACKWARD
        for _ in range(6):
            if again:
                with trace.annotated("CheckpointFunctionBackward", "cpu_op"):
                    trace.matmul(400.0)
                    trace.flash()
            with trace.annotated("autograd::engine::evaluate_function: MmBackward0", "cpu_op"):
                trace.matmul(800.0)
        trace.thread = 100

    return each_step(work)  # fmt: skip


def compiling(steps: set[int]) -> Kineto:
    def work(trace: Kineto, number: int) -> None:
        if number in steps:
            with trace.annotated("entire_frame_compile_data: fn_name=_compile.compile_inner, compile_id=0/3"):
                pass
            with (
                trace.annotated("dynamo"),
                trace.annotated("entire_frame_compile"),
                trace.annotated("_compile.compile_inner (dynamo_timed)"),
            ):
                trace.host(4000.0)
        clean_step(trace)

    return each_step(work)  # fmt: skip


def collecting(us: float, name: str = "<built-in method collect of module object at 0x7f>") -> Kineto:
    def work(trace: Kineto, _: int) -> None:
        clean_step(trace, 2)
        trace.wait()
        with trace.annotated(name, "python_function"):
            trace.host(us)

    return each_step(work)  # fmt: skip


def saving(name: str, us: float = 4000.0, cat: str = "user_annotation") -> Kineto:
    """The loop does something else for a while, under a name or under none, and the device waits."""

    def work(trace: Kineto, _: int) -> None:
        clean_step(trace, 2)
        trace.wait()
        if name:
            with trace.annotated("loop.py(7): <module>", "python_function"):
                trace.host(1.0)
                with trace.annotated(name, cat):
                    trace.host(us)
                trace.host(1.0)
        else:
            trace.host(us)
        trace.matmul()

    return each_step(work)  # fmt: skip


def pausing_in_forward() -> Kineto:
    """The loop's own range holds its operators and a pause (another process had the core): not busy elsewhere."""

    def work(trace: Kineto, _: int) -> None:
        with trace.annotated("forward"):
            for _ in range(4):
                with trace.annotated("aten::mm", "cpu_op"):
                    trace.host(1000.0)
            trace.host(1500.0)

    return each_step(work)  # fmt: skip


def writing_on_cpu(name: str) -> Kineto:
    """A process without a device that writes for half of each step."""

    def work(trace: Kineto, _: int) -> None:
        for _ in range(4):
            with trace.annotated("aten::mm", "cpu_op"):
                trace.host(1000.0)
        if name:
            with trace.annotated(name, "python_function"):
                trace.host(4000.0)
        else:
            trace.host(4000.0)

    return each_step(work)  # fmt: skip


def serving(prompt_us: float, decodes: int) -> Kineto:
    trace = Kineto()
    for _ in range(4):
        with trace.annotated("execute_context_1(4096)_generation_0(0)"):
            for _ in range(8):
                trace.matmul(prompt_us / 8)
        trace.wait()
        for _ in range(decodes):
            with trace.annotated("execute_context_0(0)_generation_8(8)"):
                for _ in range(8):
                    trace.matmul(25.0)
            trace.wait()
    return trace


def uneven_steps(slow: set[int]) -> Kineto:
    trace = Kineto()
    for number in range(1, 13):
        with trace.step(number):
            clean_step(trace)
            if number in slow:
                trace.wait()
                trace.host(9000.0)
    return trace


def padded(tokens: int) -> tuple[Kineto, int]:
    return clean(), tokens


def ranks(folder: Path, late: Callable[[int, int], float], count: int = 4, steps: int = 12) -> list[Path]:
    """Traces of all ranks of a job. `late(rank, step)` is µs of host work before the collective."""

    def work(trace: Kineto, rank: int, step: int) -> None:
        for _ in range(4):
            trace.matmul(300.0)
        if late(rank, step):
            trace.wait()
            with trace.annotated("slow_host_work"):
                trace.host(late(rank, step))
            trace.matmul(50.0)

    return synchronised(folder, work, count, steps)


def throttled(folder: Path) -> list[Path]:
    """A rank whose device multiplies at half speed, in a loop that annotates itself and waits for its device."""

    def work(trace: Kineto, rank: int, _: int) -> None:
        with trace.annotated("forward"):
            for _ in range(4):
                trace.matmul(600.0 if rank == 3 else 300.0)
            trace.wait()

    return synchronised(folder, work, 4, 12)


def synchronised(folder: Path, work: Callable[[Kineto, int, int], None], count: int, steps: int) -> list[Path]:
    """Traces of `count` ranks that do `work(trace, rank, step)` and then reduce. All clocks agree, and a collective ends
    on all of them when the last has come and the transfer (200 µs) is done."""
    made = [Kineto(rank=rank, world=count) for rank in range(count)]
    for step in range(1, steps + 1):
        begun = max(trace.now for trace in made)
        arrivals = []
        for rank, trace in enumerate(made):
            trace.now = begun
            work(trace, rank, step)
            arrivals.append(max(trace.free[7], trace.now + 6.0))
        end = max(arrivals) + 200.0
        for trace, arrival in zip(made, arrivals, strict=True):
            trace.free[20] = arrival
            trace.now = arrival - 6.0
            trace.collective("all_reduce", 10_000_000, end - arrival, ranks=count)
            trace.events[-1]["ts"], trace.events[-1]["dur"] = arrival, end - arrival
            trace.free[20] = trace.free[7] = trace.now = end
            trace.host_event("user_annotation", f"ProfilerStep#{step}", begun, end - begun)
    return [trace.write(folder / f"rank{rank}.json.gz") for rank, trace in enumerate(made)]
