"""What a run ran on: versions, devices, limits. Written to environment.json, printed by `headway doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = (
    "headway", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "peft", "triton",
    "liger-kernel", "torchao", "flash-attn", "tensorboard",
)  # fmt: skip
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "PYTORCH_ALLOC_CONF")


def collect_environment() -> dict[str, Any]:
    """Facts as plain JSON values; nothing here is guessed, what cannot be read is absent."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "cpu": {
            "logical_cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "torch_threads": torch.get_num_threads(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter to a run, of those that are installed."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Cores that this process may use (a container often has fewer than the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": item.name, "memory_bytes": item.total_memory, "capability": f"{item.major}.{item.minor}"}
        for item in properties
    ]


def free_bytes(path: Path) -> int:
    """Free space where `path` lies or would be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
