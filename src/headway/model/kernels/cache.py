"""Choices kept between runs (`$HEADWAY_HOME/kernels.json`), by device, versions and shapes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.account.measured_peaks import peaks_path
from headway.model.kernels.case import Case, Choice, Result

VERSION = 1
_PACKAGES = (
    "torch", "transformers", "triton", "liger-kernel", "cut-cross-entropy",
    "flash-attn", "flash_attn_3", "flash-attn-4", "headway",
)  # fmt: skip


def cache_path() -> Path:
    return peaks_path().with_name("kernels.json")


def cache_key(case: Case, device: str, dtype: torch.dtype) -> str:
    """Everything that could change which candidate is right or fastest."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    threads = torch.get_num_threads() if device.startswith("cpu") else None
    names = [(candidate.name, candidate.cannot()) for candidate in case.candidates]
    types = [str(value.dtype) for value in case.inputs(1) if isinstance(value, Tensor)]
    facts = [VERSION, device, threads, str(dtype), types, case.operation, case.shape, case.rows, versions, names]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def cached_choice(key: str, path: Path | None = None) -> Choice | None:
    """The choice made earlier for this key. A damaged file is no choice: it is measured and written again."""
    return choice_of(_read(path or cache_path()).get(key))


def choice_of(item: Any) -> Choice | None:
    """A choice as `asdict` gave it; None for anything else."""
    try:
        results = tuple(Result(**result) for result in item["results"])
        return replace(Choice(**{**item, "results": results}), cached=True)
    except (TypeError, KeyError):
        return None


def keep_choice(key: str, choice: Choice, path: Path | None = None) -> None:
    """Adds one choice; readers see the old file or the new one. A folder that cannot be written keeps nothing."""
    path = path or cache_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**_read(path), key: asdict(choice)}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
