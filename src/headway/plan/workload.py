"""What is trained: model, sequence length, global batch, precision."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from headway.account.errors import UserError
from headway.account.shape import ModelShape
from headway.plan.hybrid import HYBRIDS, hybrid_shape
from headway.plan.hybrid_delta import delta_shape
from headway.plan.reading import json_of

Precision = Literal["bf16", "fp16", "fp8", "fp4"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp4")

_USUAL = ["llama3-8b", "llama3-70b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"]  # named where nothing is near

_MOST = 10**9  # sequences a step, and tokens a sequence: beyond it a typing error


@dataclass(frozen=True)
class Workload:
    """One optimizer step's work.

    Attributes:
        shape: the model (exact, see headway.account.shape).
        seq: tokens in a sequence (a pack).
        global_batch: sequences per optimizer step.
        precision: of the layers' matrix products; attention, head and optimizer stay in bf16 or fp32.
        mean_square: Σ n² / Σ n over the documents of a pack (None: one document fills a sequence).
        lora: only low-rank adapters are trained, so frozen weights get no gradient of their own.
        mtp: multi-token-prediction modules trained beside the model (DeepSeek-V3, arXiv 2412.19437): each a layer and
            a pass of the head more.
    """

    shape: ModelShape
    seq: int
    global_batch: int
    precision: Precision = "bf16"
    name: str = ""
    mean_square: float | None = None
    lora: bool = False
    mtp: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.seq <= _MOST and 1 <= self.global_batch <= _MOST):
            raise UserError(f"seq {self.seq} and global_batch {self.global_batch} must be between 1 and {_MOST:,}")
        if self.mean_square is not None and not self.mean_square >= 1:
            raise UserError(f"mean_square {self.mean_square:g}: give sum n^2 / sum n of the documents, at least 1")
        if self.mean_square is not None and self.mean_square > self.seq:
            raise UserError(
                f"mean_square {self.mean_square:g} is more than seq {self.seq}: no document is longer than its pack"
            )
        if self.precision not in PRECISIONS:
            near = difflib.get_close_matches(str(self.precision), PRECISIONS, n=2) or PRECISIONS
            raise UserError(f"precision {self.precision!r} is unknown; nearest: {', '.join(near)}")

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq * self.global_batch

    @property
    def attended(self) -> float:
        """Length that attention's cost is that of: Σ n² / Σ n, the whole sequence unless documents are packed."""
        return float(self.seq if self.mean_square is None else self.mean_square)


def model_presets() -> dict[str, dict[str, Any]]:
    """Published models by name: the keys of their config.json that decide sizes."""
    text = resources.files("headway.plan").joinpath("models.json").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return content


def load_model(spec: str | Mapping[str, Any]) -> tuple[str, ModelShape]:
    """(name, shape) of a preset, a config.json, or a folder that holds one. Raises UserError naming what is wrong."""
    name, config = load_config(spec)
    try:
        return name, shape_of(config)
    except UserError as error:
        if isinstance(spec, Mapping) or not Path(spec).exists():
            raise
        path = Path(spec) / "config.json" if Path(spec).is_dir() else Path(spec)
        raise UserError(f"--model {path}: {re.sub('^config.json:? ', '', str(error))}") from error


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The exact shape of a config.json, hybrids included. Raises UserError naming the key."""
    if config.get("model_type") in HYBRIDS:
        return hybrid_shape(config)
    return delta_shape(config) if config.get("model_type") == "qwen3_next" else ModelShape.from_config(config)


def load_config(spec: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(name, content of config.json) of the same. Raises UserError naming what is wrong."""
    if isinstance(spec, Mapping):
        return str(spec.get("model_type", "model")), spec
    path = Path(spec)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"--model {spec}: a folder without config.json")
    try:
        path = path / "config.json" if path.is_dir() else path
        content = path.read_bytes() if path.is_file() else None
    except (OSError, ValueError) as error:  # a name that no file can have, or one that may not be read
        raise UserError(f"--model {spec!r}: cannot be read ({error})") from error
    if content is not None:
        config = json_of(content, f"--model {path}")
        if not isinstance(config, dict):
            raise UserError(f"--model {path}: give an object with the keys of a Hugging Face config.json")
        if not config.get("model_type"):
            raise UserError(f'--model {path}: key \'model_type\' is missing; e.g. "model_type": "llama"')
        name = path.parent.name if path.name == "config.json" else path.stem
        return name or "model", config
    presets = model_presets()
    found = presets.get(spec.casefold())
    if found is None:
        near = difflib.get_close_matches(spec.casefold(), list(presets), n=4, cutoff=0.3) or _USUAL
        raise UserError(f"--model {spec!r} is neither a file nor a preset; nearest presets: {', '.join(near)}")
    return spec.casefold(), found
