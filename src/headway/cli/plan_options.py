"""Options that every `headway plan` command shares, and the objects they name."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from headway.account.errors import UserError
from headway.cli.paths import in_path
from headway.cli.plan_numbers import of
from headway.plan.numbers import COUNT, LENGTH, SHARE, WHOLE

# Every other part of the planner is imported where it is used: `headway train` starts with this module too, and they
# take longer to import than all the rest of the command line.
if TYPE_CHECKING:
    from headway.plan.calibrate import Calibration
    from headway.plan.cluster import Cluster
    from headway.plan.workload import Workload

Model = Annotated[str, typer.Option(help="config.json, its folder, or a preset such as llama3-70b.")]
ClusterSpec = Annotated[str, typer.Option("--cluster", help="H100x1024, or a YAML file (docs/plan.md has its keys).")]
Seq = Annotated[int, typer.Option(parser=of(COUNT), help="Tokens in a sequence.")]
GlobalBatch = Annotated[int, typer.Option(parser=of(COUNT), help="Sequences per optimizer step.")]
PrecisionName = Annotated[str, typer.Option("--precision", help="bf16, fp16, fp8 or fp4.")]
MeanSquare = Annotated[
    float | None,
    typer.Option(parser=of(LENGTH), help="Packed documents: sum n^2 / sum n over their lengths (attention's length)."),
]
Fix = Annotated[str, typer.Option(help="Parts of the plan that are given, e.g. tp=8,pp=16,recompute=full.")]
Mtp = Annotated[bool, typer.Option("--mtp/--no-mtp", help="Train the config's multi-token-prediction modules.")]
Calibrate = Annotated[
    Path | None, typer.Option(parser=in_path, help="Rows or factors of your own stack (docs/plan.md).")
]
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
    from headway.plan.workload import PRECISIONS, Workload, load_model

    if precision not in PRECISIONS:
        near = difflib.get_close_matches(precision, PRECISIONS, n=2) or PRECISIONS
        raise UserError(f"--precision {precision!r} is unknown; nearest: {', '.join(near)}")
    name, shape = load_model(model)
    return Workload(shape, seq, global_batch, precision, name, mean_square, mtp=shape.mtp_layers if mtp else 0)


def parse_fix(text: str) -> dict[str, Any]:
    """`tp=8,pp=16,recompute=full` as values of Layout's fields. Raises UserError naming the key."""
    from headway.plan.layout import Layout

    hints = get_type_hints(Layout)
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in hints:
            near = difflib.get_close_matches(key, list(hints), n=3, cutoff=0.5)
            known = f"nearest: {', '.join(near)}" if near else "e.g. tp, pp, cp, micro_batch (docs/plan.md has all)"
            raise UserError(f"--fix {item!r}: no such key; {known}")
        if key in given:
            raise UserError(f"--fix {text!r}: {key} is given twice")
        given[key] = _value(key, value.strip(), hints[key])
    return given


_CHOICES = {"zero": ("0", "1", "2", "3"), "grad_bytes": ("2", "4", "6"), "optimizer_bits": ("8", "32")}


def _value(key: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.casefold() not in ("true", "false", "1", "0"):
            raise UserError(f"--fix {key}={text}: give true or false")
        return text.casefold() in ("true", "1")
    if key in _CHOICES:
        if text not in _CHOICES[key]:
            raise UserError(f"--fix {key}={text}: give {' or '.join(_CHOICES[key])}")
        return int(text)
    if kind in (int, float):
        try:
            return (SHARE if kind is float else WHOLE if key in ("shard", "etp") else COUNT).read(text)
        except ValueError as error:
            raise UserError(f"--fix {key}={text}: {error}") from None
    if text not in get_args(kind):
        near = difflib.get_close_matches(text, get_args(kind), n=2, cutoff=0.75)
        known = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(get_args(kind))}"
        raise UserError(f"--fix {key}={text}: {known}")
    return text


def cluster_of(spec: str) -> Cluster:
    from headway.plan.cluster import load_cluster

    return load_cluster(spec)


def kind_of(spec: str, gpus: int) -> Cluster:
    """The same where only the kind of machine matters: `H100` will do; `gpus` of them."""
    from headway.plan.cluster import load_cluster

    bare = not re.search(r"\dx|x\d|[×*]|\.ya?ml$", spec)
    return load_cluster(f"{spec}x{gpus}" if bare else spec).with_gpus(gpus)


def skipped_line(found: Calibration) -> str:
    """How many rows of a calibration file could not be read, with the first; "" where all could."""
    if not found.skipped:
        return ""
    first = found.skipped[0]
    return f"{len(found.skipped)} rows skipped, the first {first.where}: {first.reason}"


def factor_of(path: Path | None, stack: str, device: str, precision: str) -> float:
    """What --calibrate says of that device and precision; 1 without it. Raises UserError for an unknown --stack."""
    from headway.plan.calibrate import load_calibration
    from headway.plan.constants import default_constants

    if path is None:
        if stack:
            raise UserError(f"--stack {stack!r} needs --calibrate, the file that holds its factor or its rows")
        return 1.0
    found = load_calibration(path, default_constants())
    stacks = sorted({group[0] for group in found.factors})
    if not stacks:
        raise UserError(
            f"--calibrate {path}: no row can calibrate; {skipped_line(found) or 'none has a plan and a speed'}"
        )
    if found.skipped:
        print(f"--calibrate {path}: {skipped_line(found)}", file=sys.stderr)
    name = stack or (stacks[0] if len(stacks) == 1 else "")
    if name not in stacks:
        raise UserError(f"--stack {stack!r} is not in {path}; there are: {', '.join(stacks)}")
    return found.factor((name, device, precision))
