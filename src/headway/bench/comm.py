"""`headway bench comm`: seconds of collectives by size on this machine's own links, for `headway plan calibrate`.

Ranks are started here (gloo on a CPU, NCCL on GPUs), or, under a launcher that sets WORLD_SIZE, are the launcher's:
then groups inside a node (the planner's link) and over nodes (its network) are measured. All groups of a size run
at once, as in training. The slowest rank's time counts; a wrong sum is an error.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from headway.account.errors import UserError
from headway.parallel.device import choose_device

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_LEAST_REPEATS, _MOST_REPEATS = 5, 200


@dataclass(frozen=True)
class CommEntry:
    """One collective on one message: `bytes` is the whole buffer (docs/plan.md has the volumes), seconds of the slowest
    rank: median, lowest and highest of `repeats`; `groups` such groups ran at once."""

    op: str
    ranks: int
    nodes: int
    groups: int
    bytes: int
    seconds: float
    low_s: float
    high_s: float
    repeats: int
    backend: str
    device: str
    host: str
    torch: str
    when: str

    @property
    def bus(self) -> float:
        """Bus bandwidth, bytes/s of one rank and direction (NCCL tests' busbw)."""
        return (2 if self.op == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.bytes / self.seconds


@dataclass(frozen=True)
class CommOptions:
    """What is measured. seconds is for each (collective, size, group); sizes are bytes."""

    ops: tuple[str, ...] = OPS
    sizes: tuple[int, ...] = ()
    seconds: float = 0.3
    device: str = "auto"


@dataclass
class CommReport:
    """Entries, and collectives that the backend does not have."""

    entries: list[CommEntry] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def record(self) -> list[dict[str, Any]]:
        """What `headway plan calibrate` reads."""
        return [asdict(entry) for entry in self.entries]

    def lines(self) -> list[str]:
        """A line a measurement: time and bus bandwidth."""
        rows = [f"{'collective':<16}{'ranks':>6}{'nodes':>6}{'bytes':>14}{'median':>12}{'low … high':>24}{'bus':>14}"]
        for one in self.entries:
            spread = f"{one.low_s * 1e6:.0f} … {one.high_s * 1e6:.0f} µs"
            rows.append(
                f"{one.op:<16}{one.ranks:>6}{one.nodes:>6}{one.bytes:>14,}{one.seconds * 1e6:>9.0f} µs"
                f"{spread:>24}{one.bus / 1e9:>9.3g} GB/s"
            )
        return rows + [f"not measured: {text}" for text in self.missing]


def default_sizes(device: str) -> tuple[int, ...]:
    """Bytes: from where latency is all to where bandwidth is."""
    largest = 30 if device == "cuda" else 24
    return tuple(2**power for power in range(12, largest + 1, 3))


def bench_comm(ranks: int | None, options: CommOptions) -> CommReport | None:
    """Measures with `ranks` processes of this machine (default: its GPUs, or 2), or as the rank that a launcher made
    this process: then None on every rank but the first. Raises UserError for impossible ranks, sizes and collectives.
    """
    _check(options)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if ranks is not None:
            raise UserError("--ranks: a launcher has started the ranks already (WORLD_SIZE is set); leave it out")
        return _of_launcher(options)
    if options.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {options.device!r} is unknown; nearest: auto, cpu, cuda")
    if options.device == "cuda":
        choose_device("cuda")  # says so where there is none, before a rank starts
    gpus = torch.cuda.device_count() if options.device != "cpu" and torch.cuda.is_available() else 0
    count = ranks if ranks is not None else gpus or 2
    if count < 2:
        raise UserError(f"--ranks {count}: a collective needs at least 2 ranks")
    if gpus and count > gpus:
        raise UserError(f"--ranks {count}: this machine has {gpus} GPUs")
    return _spawn(count, options, gpus > 0)


def _check(options: CommOptions) -> None:
    for op in options.ops:
        if op not in OPS:
            raise UserError(f"--ops {op!r} is unknown; nearest: {', '.join(OPS)}")
    if not options.seconds > 0:
        raise UserError(f"--seconds {options.seconds}: give a positive number")
    for size in options.sizes:
        if not 4 <= size <= 2**36:
            raise UserError(f"--sizes {size}: give bytes from 4 to 64G")


def _spawn(count: int, options: CommOptions, cuda: bool) -> CommReport:
    # A forked child has torch imported already; CUDA cannot be used in one.
    context: Any = multiprocessing.get_context("spawn" if cuda else "fork")
    with tempfile.TemporaryDirectory(prefix="headway-comm-") as folder:
        answers: Any = context.SimpleQueue()
        arguments = [(rank, count, folder, options, answers) for rank in range(count)]
        ranks = [context.Process(target=_local_rank, args=each, daemon=True) for each in arguments]
        for process in ranks:
            process.start()
        try:
            found: CommReport | str = _first_answer(answers, ranks)
        finally:
            for process in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
    if isinstance(found, str):
        raise UserError(f"bench comm: {found}")
    return found


def _first_answer(answers: Any, ranks: Sequence[Any]) -> CommReport | str:
    """The first rank's report, or why one of them could not go on."""
    while answers.empty():
        dead = [n for n, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if dead and answers.empty():
            return f"rank {dead[0]} ended with {ranks[dead[0]].exitcode}"
        time.sleep(0.02)
    found: CommReport | str = answers.get()
    return found


def _local_rank(rank: int, count: int, folder: str, options: CommOptions, answers: Any) -> None:
    try:
        torch.set_num_threads(1)
        device = choose_device(options.device, rank)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=count)
        report = measure(options, device.torch, device.name, local=count)
        if rank == 0:
            answers.put(report)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        said = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception_only(error)).strip()
        answers.put(f"rank {rank}: {said.splitlines()[0]}")


def _of_launcher(options: CommOptions) -> CommReport | None:
    device = choose_device(options.device, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    local = int(_slowest([float(local)], device.torch)[0])  # all ranks must make the same groups, also on uneven nodes
    try:
        report = measure(options, device.torch, device.name, local)
        dist.barrier()
        return report if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def measure(options: CommOptions, device: torch.device, name: str, local: int) -> CommReport:
    """Every collective, size and group of the initialised world, `local` ranks a node. Every rank must call this."""
    world = dist.get_world_size()
    report = CommReport()
    for size in _group_sizes(world, local):
        group = _own_group(size, world)
        for op in options.ops:
            for count in options.sizes or default_sizes(device.type):
                try:
                    times = _timed(op, count, size, group, device, options.seconds)
                except (RuntimeError, NotImplementedError) as error:
                    report.missing.append(f"{op} over {size} ranks: {str(error).splitlines()[0]}")
                    break
                report.entries.append(_entry(op, count, size, times, world, local, name))
    return report


def _group_sizes(world: int, local: int) -> list[int]:
    """2, 4, … inside a node and the node; two nodes, four, … and the world."""
    inside = [2**n for n in range(1, 12) if 2**n < local] + [local]
    across = [local * 2**n for n in range(1, 20) if local * 2**n < world] + [world]
    return [n for n in dict.fromkeys([*inside, *across]) if n > 1 and world % n == 0]


def _own_group(size: int, world: int) -> Any:
    """This rank's group of neighbours; every rank makes all of them, in one order."""
    if size == world:
        return dist.group.WORLD
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
    return groups[dist.get_rank() // size]


def _timed(op: str, size: int, ranks: int, group: Any, device: torch.device, seconds: float) -> list[float]:
    """Seconds of single collectives, the slowest rank's each; the checked first and a second are left out."""
    run, check = _collective(op, size, ranks, group, device)
    run()
    _wait(device)
    if _slowest([0.0 if check() else 1.0], device)[0]:  # all ranks must hear of it, or the others would wait for ever
        raise UserError(f"{op} of {size:,} bytes over {ranks} ranks gave a wrong result: do not train on these links")
    start = time.perf_counter()
    run()
    _wait(device)
    guess = _slowest([time.perf_counter() - start], device)[0]
    repeats = int(min(_MOST_REPEATS, max(_LEAST_REPEATS, seconds / max(guess, 1e-7))))
    times = []
    for _ in range(repeats):
        dist.barrier(group)
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return _slowest(times, device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(times: list[float], device: torch.device) -> list[float]:
    """Each number's largest over all ranks."""
    held = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return [float(value) for value in held.tolist()]


def _collective(
    op: str, size: int, ranks: int, group: Any, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], bool]]:
    """(the collective on a buffer of about `size` bytes of fp32, whether its last result was right)."""
    # Renamed in torch 2.13; 2.11 has the old names only.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part = max(1, size // 4 // ranks)
    mine = float(dist.get_rank(group) + 1)
    total = ranks * (ranks + 1) / 2
    whole = torch.full((part * ranks,), mine, device=device)
    piece = torch.full((part,), mine, device=device)
    if op == "all_reduce":
        out = whole.clone()
        return lambda: dist.all_reduce(out, group=group), lambda: bool((out == total).all())
    if op == "all_gather":
        out = torch.zeros_like(whole)
        expected = torch.arange(1, ranks + 1, device=device, dtype=out.dtype).repeat_interleave(part)
        return lambda: gather(out, piece, group=group), lambda: bool((out == expected).all())
    if op == "reduce_scatter":
        out = torch.zeros_like(piece)
        return lambda: scatter(out, whole, group=group), lambda: bool((out == total).all())
    out = torch.zeros_like(whole)
    expected = torch.arange(1, ranks + 1, device=device, dtype=out.dtype).repeat_interleave(part)
    return lambda: dist.all_to_all_single(out, whole, group=group), lambda: bool((out == expected).all())


def _entry(op: str, size: int, ranks: int, times: list[float], world: int, local: int, name: str) -> CommEntry:
    return CommEntry(
        op=op,
        ranks=ranks,
        nodes=max(1, -(-ranks // local)),
        groups=world // ranks,
        bytes=max(1, size // 4 // ranks) * ranks * 4,
        seconds=statistics.median(times),
        low_s=min(times),
        high_s=max(times),
        repeats=len(times),
        backend=str(dist.get_backend()),
        device=name,
        host=platform.node(),
        torch=torch.__version__,
        when=time.strftime("%Y-%m-%d %H:%M"),
    )


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4K,1M,256M` as bytes (K, M, G are powers of 1,024). Raises UserError naming the piece."""
    found = []
    for piece in filter(None, (one.strip() for one in text.split(","))):
        digits = piece.rstrip("kKmMgGiIbB")
        power = {"": 0, "k": 10, "m": 20, "g": 30}.get(piece[len(digits) :].casefold().rstrip("b").rstrip("i"))
        if power is None or not digits.isdigit() or not 0 < len(digits) < 13:
            raise UserError(f"--sizes {piece!r}: give bytes such as 4K, 1M or 256M")
        found.append(int(digits) << power)
    return tuple(found)


def write(report: CommReport, path: Path) -> None:
    """Keeps the entries as JSON."""
    try:
        path.write_bytes(orjson.dumps(report.record(), option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from error
