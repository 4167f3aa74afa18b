"""Checks of a machine before a run: each says what it found and, where it matters, what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headway.guard.environment import collect_environment, free_bytes, usable_cores

Verdict = Literal["good", "note", "bad"]
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of `headway doctor`. `bad` means that training would fail or be wrong."""

    check: str
    verdict: Verdict
    text: str


def examine(folder: Path) -> list[Finding]:
    """All checks; `folder` is where runs would be written."""
    environment = collect_environment()
    packages = environment["packages"]
    return [
        Finding("python", "good", f"{environment['python']} on {environment['platform']}"),
        Finding("torch", "good", f"{packages['torch']}, transformers {packages['transformers']}"),
        *_devices(environment),
        _matmul(),
        _attention(),
        _collectives(),
        _space(folder),
        *_optional(packages),
    ]


def _devices(environment: dict) -> Iterator[Finding]:
    cores, threads = usable_cores(), torch.get_num_threads()
    verdict: Verdict = "good" if threads <= cores else "note"
    advice = "" if threads <= cores else "; more threads than cores slow each other down: lower OMP_NUM_THREADS"
    memory = environment["memory_bytes"] / _GIB
    yield Finding("cpu", verdict, f"{cores} usable cores, {threads} torch threads, {memory:.0f} GiB of memory{advice}")
    for index, gpu in enumerate(environment["gpus"]):
        yield Finding(f"gpu {index}", "good", f"{gpu['name']}, {gpu['memory_bytes'] / _GIB:.0f} GiB")
    if not environment["gpus"]:
        build = (
            f"this torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "this torch is a CPU build"
        )
        yield Finding("gpu", "note", f"none visible ({build}); training runs on the CPU")


def _matmul() -> Finding:
    """A product with a known answer: small whole numbers are exact in every float type down to bfloat16's inputs."""
    return _checked("matmul", _matmul_is_exact, "exact on {}")


def _matmul_is_exact() -> list[str]:
    wrong = []
    for device in _all_devices():
        left = torch.arange(64, device=device).reshape(8, 8).float() % 7
        right = torch.arange(64, device=device).reshape(8, 8).float() % 5
        expected = (left.long().cpu()[:, :, None] * right.long().cpu()[None]).sum(1)
        for dtype in (torch.float32, torch.bfloat16):
            if not torch.equal((left.to(dtype) @ right.to(dtype)).long().cpu(), expected):
                wrong.append(f"{device} in {dtype}")
    return wrong


def _attention() -> Finding:
    return _checked("attention", _attention_is_causal, "causal on {}")


def _attention_is_causal() -> list[str]:
    wrong = []
    for device in _all_devices():
        q = torch.randn(1, 2, 16, 32, device=device)
        before = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        changed = q.clone()
        changed[:, :, -1] += 1
        after = torch.nn.functional.scaled_dot_product_attention(changed, changed, changed, is_causal=True)
        if not torch.allclose(before[:, :, :-1], after[:, :, :-1]) or torch.allclose(before, after):
            wrong.append(str(device))
    return wrong


def _collectives() -> Finding:
    available = [name for name in ("gloo", "nccl") if torch.distributed.is_backend_available(name)]
    missing_nccl = torch.cuda.is_available() and "nccl" not in available
    text = f"backends: {', '.join(available) or 'none'}"
    return Finding(
        "collectives", "bad" if missing_nccl else "good", text + (": NCCL is missing" if missing_nccl else "")
    )


def _space(folder: Path) -> Finding:
    free = free_bytes(folder.absolute()) / _GIB
    try:
        target = folder if folder.is_dir() else folder.absolute().parent
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as error:
        return Finding("disk", "bad", f"{folder}: cannot be written ({error.strerror}); set `out` elsewhere")
    verdict: Verdict = "good" if free >= 10 else "note"
    advice = "" if free >= 10 else "; a checkpoint with AdamW's state takes 12 bytes a parameter"
    return Finding("disk", verdict, f"{free:.0f} GiB free for {folder}{advice}")


def _optional(packages: dict[str, str]) -> Iterator[Finding]:
    for name, use in (("tensorboard", "the TensorBoard sink"), ("torchao", "optim.name: adamw8bit")):
        if name not in packages:
            yield Finding(name, "note", f"not installed; needed for {use}")


def _checked(name: str, check: Callable[[], list[str]], good: str) -> Finding:
    try:
        wrong = check()
    except RuntimeError as error:
        return Finding(name, "bad", f"failed: {str(error).splitlines()[0]}")
    if wrong:
        return Finding(name, "bad", f"wrong result on {', '.join(wrong)}: do not train on this machine")
    return Finding(name, "good", good.format(", ".join(map(str, _all_devices()))))


def _all_devices() -> list[torch.device]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]
