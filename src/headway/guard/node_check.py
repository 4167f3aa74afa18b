"""Does this machine compute, remember and carry right? `headway doctor --node`, before a run and before it comes back.

Every test has a known answer, compared bit for bit: a machine that is wrong once in a million products trains on, and
nobody sees it in the loss.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from headway.guard.doctor import Finding
from headway.guard.ranks import read_rank_env

# Sums of 1024 products of whole numbers up to 8 stay below 2**24: exact in float32 in any order.
_SIZE, _LARGEST = 1024, 8
_PATTERNS = (0x00, 0xFF, 0xAA, 0x55)
_LINK_NUMBERS = 1 << 22
_LINK_ROUNDS = 5
_TIMEOUT_S = 60.0


def examine_node(seconds: float = 5.0, memory_bytes: int = 256 << 20) -> list[Finding]:
    """Matmul, memory and links of every device here, about `seconds` of arithmetic and `memory_bytes` on each."""
    findings = []
    for device in _devices():
        findings.append(_guarded(f"matmul {device}", lambda d: check_matmul(d, seconds), device))
        findings.append(_guarded(f"memory {device}", lambda d: check_memory(d, memory_bytes), device))
        if device.type == "cuda":
            findings.append(_guarded(f"copies {device}", check_copies, device))
    findings.append(check_link(os.environ))
    return findings


def check_matmul(device: torch.device, seconds: float, multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm) -> str:
    """Products of whole numbers for `seconds`, each compared with the exact one. Raises ValueError where it differs."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-_LARGEST, _LARGEST + 1, (_SIZE, _SIZE), generator=generator) for _ in range(2))
    exact = (left.double() @ right.double()).float().to(device)  # whole numbers below 2**53: exact
    a, b = left.float().to(device), right.float().to(device)
    done, begun = 0, time.monotonic()
    while not done or time.monotonic() - begun < seconds:
        found = multiply(a, b)
        if not torch.equal(found, exact):
            wrong = int((found != exact).sum())
            raise ValueError(f"{wrong} of {found.numel()} numbers wrong in product {done + 1}")
        done += 1
    rate = 2 * _SIZE**3 * done / (time.monotonic() - begun) / 1e9
    return f"{done} products of {_SIZE}×{_SIZE} exact, {rate:.0f} GFLOP/s with the comparison"


def check_memory(device: torch.device, size: int, spoil: Callable[[Tensor], None] | None = None) -> str:
    """Patterns and addresses written to `size` bytes and read back. Raises ValueError where they differ.

    `spoil`: called between writing and reading (the tests' planted fault).
    """
    words = torch.empty(size // 8, dtype=torch.int64, device=device)
    for pattern in _PATTERNS:
        value = int.from_bytes(bytes([pattern]) * 8, "little", signed=True)
        words.fill_(value)
        _read_back(words, spoil, value)
    addresses = torch.arange(len(words), dtype=torch.int64, device=device)
    words.copy_(addresses)  # an address line that is stuck shows only where each place holds another value
    _read_back(words, spoil, addresses)
    return f"{size >> 20} MiB held {len(_PATTERNS)} patterns and their own addresses"


def _read_back(words: Tensor, spoil: Callable[[Tensor], None] | None, expected: int | Tensor) -> None:
    if spoil is not None:
        spoil(words)
    wrong = int((words != expected).sum())
    if wrong:
        raise ValueError(f"{wrong} of {len(words)} words are not what was written")


def check_copies(device: torch.device) -> str:
    """Host to device and back, and to every other device, bit for bit."""
    sent = torch.randint(-(2**62), 2**62, (_LINK_NUMBERS,), generator=torch.Generator().manual_seed(1))
    pinned = sent.pin_memory()
    begun = time.monotonic()
    there = pinned.to(device)
    back = there.cpu()
    rate = 2 * sent.nbytes / (time.monotonic() - begun) / 1e9
    if not torch.equal(back, sent):
        raise ValueError("a copy from the host and back is not what was sent")
    others = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for other in others:
        if other != device and not torch.equal(there.to(other).cpu(), sent):
            raise ValueError(f"a copy to {other} is not what was sent")
    return f"host copies right at {rate:.1f} GB/s, {len(others) - 1} other devices reached"


def check_link(environ: Mapping[str, str]) -> Finding:
    """Sums over ranks with a known answer: all ranks of the job when it has any, else two on this machine."""
    ranks = read_rank_env(environ)
    if ranks is not None and ranks.world_size > 1:
        address = f"tcp://{ranks.master_addr}:{ranks.master_port}"
        name, problem = f"link, rank {ranks.rank}", _try_link(address, ranks.rank, ranks.world_size)
        return Finding(name, "bad" if problem.startswith("wrong") else "good", problem)
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        workers = [context.Process(target=_link_worker, args=(address, rank, folder)) for rank in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(_TIMEOUT_S)
            worker.kill()
        said = [path.read_text() for path in sorted(Path(folder).iterdir())]
    if len(said) < 2:
        return Finding("link", "bad", "wrong: two processes on this machine could not talk to each other")
    bad = next((text for text in said if text.startswith("wrong")), None)
    return Finding("link", "bad" if bad else "good", bad or said[0])


def _link_worker(address: str, rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    Path(folder, str(rank)).write_text(_try_link(address, rank, 2))
    os._exit(0)


def _try_link(address: str, rank: int, world: int) -> str:
    try:
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=_TIMEOUT_S)
        )
        return _sum_over_ranks(rank, world)
    except (RuntimeError, ValueError) as error:
        return f"wrong: {str(error).splitlines()[0]}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _sum_over_ranks(rank: int, world: int) -> str:
    base = torch.arange(_LINK_NUMBERS, dtype=torch.int64)
    begun = time.monotonic()
    for turn in range(_LINK_ROUNDS):
        box = base + turn + rank
        dist.all_reduce(box)
        if not torch.equal(box, world * (base + turn) + world * (world - 1) // 2):
            raise ValueError(f"the sum of round {turn + 1} over {world} ranks is not what it must be")
    rate = _LINK_ROUNDS * base.nbytes / (time.monotonic() - begun) / 1e9
    return f"{_LINK_ROUNDS} sums of {base.nbytes >> 20} MiB over {world} ranks exact, {rate:.2f} GB/s"


def _guarded(name: str, check: Callable[[torch.device], str], device: torch.device) -> Finding:
    try:
        return Finding(name, "good", check(device))
    except (ValueError, RuntimeError) as error:
        return Finding(name, "bad", f"{str(error).splitlines()[0]}: do not train on this machine")


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    yield from (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
