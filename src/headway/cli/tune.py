"""`headway tune RUN.yaml`: find what makes this training faster, one proven change at a time."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.output import print_json
from headway.cli.scratch import scratch_folder

if TYPE_CHECKING:
    from headway.config.load import LoadedRun
    from headway.config.run import RunConfig
    from headway.tune.write import Setting

ROOM = 8192
"""Bytes for what is added to the run file's text."""


def tune(
    run_file: Annotated[Path, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. preset=naive.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a profile.", min=1)] = 10,
    verify_steps: Annotated[int, typer.Option(help="Steps that a change must agree over.", min=1)] = 3,
    most_seconds: Annotated[
        float, typer.Option("--seconds", help="Longest time of a profile's steps (two are always made).", min=0)
    ] = 60.0,
    against: Annotated[
        str | None, typer.Option(help="Then profile what was found beside this preset, in turn.", metavar="PRESET")
    ] = None,
    precision: Annotated[
        bool, typer.Option("--precision", help="Measure each layer's error instead; propose train.sensitive.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Profile, apply one remedy, profile again, keep or put back; verify what was kept; write RUN.tuned.yaml.

    Example: headway tune run.yaml preset=naive
    """
    from headway.account.errors import UserError
    from headway.cli.paths import why_no_room, why_not_written
    from headway.cli.progress import progress
    from headway.config.load import load_run
    from headway.prove.verify import refuse_measured_precision
    from headway.train.data import prepare_sources
    from headway.tune.write import tuned_path

    if precision and against is not None:
        raise UserError("tune: --precision measures layers, and --against profiles presets; give one of them")
    loaded = load_run(run_file, overrides or [])
    config = loaded.config
    if not precision:  # before the hours of work: neither can be mended at their end
        refuse_measured_precision("tune", config)
        written, room = tuned_path(run_file), ROOM + 2 * run_file.stat().st_size
        if problem := why_not_written(written, str(written)) or why_no_room(written, room):
            raise UserError(f"{written} {problem}; tune writes what it finds there")
    prepare_sources(config, _say, None if json else progress())
    with scratch_folder("tune") as scratch:
        if precision:
            return _precision(config, scratch, json)
        return _tune(run_file, overrides or [], loaded, scratch, steps, verify_steps, most_seconds, against, json)


def _tune(
    run_file: Path,
    overrides: list[str],
    loaded: LoadedRun,
    scratch: Path,
    steps: int,
    verify_steps: int,
    most_seconds: float,
    against: str | None,
    json: bool,
) -> int:
    from headway.config.load import load_run
    from headway.prove.verify import verify
    from headway.tune.profile import LEAST_SECONDS, Profile, profile
    from headway.tune.rounds import Round, beside, table
    from headway.tune.rounds import tune as run_tune
    from headway.tune.write import as_overrides, given, own_name, tuned_path

    other = None
    if against is not None:  # before the minutes of work: the name may be wrong
        other = load_run(run_file, [*(o for o in overrides if not o.startswith("preset=")), f"preset={against}"]).config
    number = iter(range(10**6))

    def measure(candidate: RunConfig, rival: Profile | None) -> Profile:
        folder = scratch / str(next(number))
        least = min(LEAST_SECONDS, most_seconds)
        return profile(candidate, folder, steps=steps, rival=rival, least_seconds=least, most_seconds=most_seconds)

    def check(before: RunConfig, after: RunConfig) -> str | None:
        _say(f"verifying: the run file's own training and what was kept of it, {verify_steps} steps")
        found = verify(
            before, after, scratch / str(next(number)), steps=verify_steps, held_out=1, say=lambda text: None
        ).verdict
        if found.same:
            return None
        worst = found.failed[0]
        return f"not the same training ({worst.name} off by {worst.value:.3g}, {worst.limit:.3g} allowed)"

    def tell(done: Round) -> None:
        _say(f"{done.remedy.name}: {done.verdict}" + ("" if done.measured is None else f" ({done.gain})"))

    found = run_tune(loaded.config, measure, check, tell)
    if not json:
        print("\n".join(table(found)), flush=True)
    record = _record(found)
    shares: list[float] = []
    settings, name = [*given(overrides, Path.cwd()), *_kept(found)], own_name(loaded.config)
    # Without a name of its own the file's name counts, which is the same.
    text, problem = _text(run_file, [*settings, name] if "name" in loaded.provenance.origins else settings, found)
    try:
        written = tuned_path(run_file)
        problem = f"it would not be what was proved: {problem}" if problem else _not_written(written, text)
        if problem:
            record["overrides"] = as_overrides([*settings, name])
            _say(f"headway: {written} is not written: {problem}")
            if not json:
                print(f"what was proved: headway train {shlex.join([str(run_file), *record['overrides']])}", flush=True)
        else:
            record["written"] = str(written)
            if not json:
                print(f"written: {written}", flush=True)
        shares = [] if other is None else beside(found, other, measure)
    finally:  # the measurements are told, whatever the preset does
        if json:
            print_json({**record, "over_preset": {against: shares} if shares else {}})
    if shares and not json:
        print(f"of preset {against} in packs of the same size, in turn: {', '.join(f'{x:.1%}' for x in shares)}")
    return 3 if problem else 0


def _not_written(path: Path, text: str) -> str:
    """Writes; why it could not be (the disk may have filled up meanwhile), empty where it was."""
    from headway.record.files import write_atomic

    try:
        write_atomic(path, text)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _kept(found: Any) -> list[Setting]:
    from headway.tune.write import Setting

    settings = []
    for each in found.kept:
        note = f"tuned: {each.remedy.name}, {each.gain} tokens/s; {each.remedy.evidence[0]}"
        settings += [Setting(key, value, note) for key, value in each.remedy.change.items()]
    return settings


def _text(run_file: Path, settings: list[Setting], found: Any) -> tuple[str, str]:
    """RUN.tuned.yaml, and why it is not what was proved (empty: it is)."""
    from headway.account.errors import UserError
    from headway.tune.write import tuned_text, why_not_the_same

    head = f"# Tuned from {run_file.name} by `headway tune`: {found.speedup:.2f} x effective tokens/s.\n"
    try:
        text = head + tuned_text(run_file.read_text(encoding="utf-8"), settings)
    except UserError as error:
        return "", str(error)
    return text, why_not_the_same(text, found.config, run_file)


def _record(found: Any) -> dict[str, Any]:
    return {
        "written": None,
        "tokens_per_second": {"before": found.first.speed, "after": found.last.speed},
        "mfu": {"before": found.first.mfu, "after": found.last.mfu},
        "rounds": [
            {
                "change": dict(each.remedy.change),
                "name": each.remedy.name,
                "evidence": list(each.remedy.evidence),
                "predicted": each.remedy.gain,
                "measured": each.measured,
                "spread": each.spread,
                "mfu": each.mfu,
                "kept": each.kept,
                "verdict": each.verdict,
            }
            for each in found.rounds
        ],
    }


def _precision(config: RunConfig, scratch: Path, json: bool) -> int:
    from dataclasses import asdict

    from headway.tune.precision import measure_layers, precision_lines

    found = measure_layers(config, scratch)
    if json:
        print_json(asdict(found))
    else:
        print("\n".join(precision_lines(found)))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def register(app: typer.Typer) -> None:
    app.command()(tune)
