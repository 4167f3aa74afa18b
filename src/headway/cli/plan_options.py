"""Options that every `headway plan` command shares, and the objects they name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from headway.account.errors import UserError
from headway.plan.cluster import Cluster, load_cluster
from headway.plan.layout import Layout
from headway.plan.workload import PRECISIONS, Workload, load_model

Model = Annotated[str, typer.Option(help="config.json, its folder, or a preset such as llama3-70b.")]
ClusterSpec = Annotated[str, typer.Option("--cluster", help="H100x1024, or a YAML file (docs/plan.md has its keys).")]
Seq = Annotated[int, typer.Option(help="Tokens in a sequence.")]
GlobalBatch = Annotated[int, typer.Option(help="Sequences per optimizer step.")]
PrecisionName = Annotated[str, typer.Option("--precision", help="bf16, fp16, fp8 or fp4.")]
MeanSquare = Annotated[
    float | None, typer.Option(help="Packed documents: sum n^2 / sum n over their lengths (attention's length).")
]
Fix = Annotated[str, typer.Option(help="Parts of the plan that are given, e.g. tp=8,pp=16,recompute=full.")]
Calibrate = Annotated[Path | None, typer.Option(help="Rows or factors of your own stack (docs/plan.md).")]
StackName = Annotated[str, typer.Option("--stack", help="Whose factor of --calibrate to use, e.g. nemo.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns a file that cannot be written into a UserError naming the option."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror or error})") from error


def make_workload(
    model: str, seq: int, global_batch: int, precision: str, mean_square: float | None = None, mtp: bool = True
) -> Workload:
    """The workload the options name, with the multi-token-prediction modules of the model's config unless denied.

    Raises UserError naming the option.
    """
    if precision not in PRECISIONS:
        near = difflib.get_close_matches(precision, PRECISIONS, n=2) or PRECISIONS
        raise UserError(f"--precision {precision!r} is unknown; nearest: {', '.join(near)}")
    name, shape = load_model(model)
    return Workload(shape, seq, global_batch, precision, name, mean_square, mtp=shape.mtp_layers if mtp else 0)


def parse_fix(text: str) -> dict[str, Any]:
    """`tp=8,pp=16,recompute=full` as values of Layout's fields. Raises UserError naming the key."""
    hints = get_type_hints(Layout)
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in hints:
            near = difflib.get_close_matches(key, list(hints), n=3, cutoff=0.3) or sorted(hints)
            raise UserError(f"--fix {item!r}: no such key; nearest: {', '.join(near)}")
        given[key] = _value(key, value.strip(), hints[key])
    return given


def _value(key: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.casefold() not in ("true", "false", "1", "0"):
            raise UserError(f"--fix {key}={text}: give true or false")
        return text.casefold() in ("true", "1")
    if kind is int:
        least = 0 if key in ("zero", "shard") else 1
        if not text.isdigit() or int(text) < least:
            raise UserError(f"--fix {key}={text}: give a whole number of at least {least}")
        if key == "zero" and int(text) > 3:
            raise UserError(f"--fix zero={text}: give 0, 1, 2 or 3")
        return int(text)
    if text not in get_args(kind):
        near = difflib.get_close_matches(text, get_args(kind), n=2) or get_args(kind)
        raise UserError(f"--fix {key}={text}: nearest: {', '.join(near)}")
    return text


def fixed_layout(given: dict[str, Any], cluster: Cluster) -> Layout:
    """A complete plan from its given parts: what is left of the GPUs becomes dp."""
    layout = replace(Layout(), **given)
    if "dp" in given:
        return layout
    others = layout.tp * layout.pp * layout.cp
    if cluster.gpus % others:
        raise UserError(f"--fix tp·pp·cp = {others} does not divide {cluster.gpus} GPUs")
    return replace(layout, dp=cluster.gpus // others)


def cluster_of(spec: str) -> Cluster:
    return load_cluster(spec)


def kind_of(spec: str, gpus: int) -> Cluster:
    """The same where only the kind of machine matters: `H100` will do; `gpus` of them."""
    bare = not re.search(r"\dx|x\d|[×*]|\.ya?ml$", spec)
    return load_cluster(f"{spec}x{gpus}" if bare else spec).with_gpus(gpus)


def factor_of(path: Path | None, stack: str, device: str, precision: str) -> float:
    """What --calibrate says of that device and precision; 1 without it. Raises UserError for an unknown --stack."""
    from headway.plan.calibrate import load_calibration
    from headway.plan.constants import default_constants

    if path is None:
        return 1.0
    found = load_calibration(path, default_constants())
    stacks = sorted({group[0] for group in found.factors})
    name = stack or (stacks[0] if len(stacks) == 1 else "")
    if name not in stacks:
        raise UserError(f"--stack {stack!r} is not in {path}; there are: {', '.join(stacks)}")
    return found.factor((name, device, precision))
