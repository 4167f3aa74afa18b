"""Runs rows by the manifest, each in a process of its own that is forked after the imports, and prints the table."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import pickle
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.account.errors import UserError
from headway.bench import faults
from headway.bench.faults.case import Case, Result, Skipped

if TYPE_CHECKING:
    from headway.bench.faults.storm import Storm

MANIFEST = Path(__file__).with_name("campaign.json")
_WATCHDOG_S = 600.0

Row = Callable[[Case], None]


@dataclass(frozen=True)
class Entry:
    """A line of the manifest: which fault, injected how, with which right outcome."""

    row: int
    name: str
    seed: int
    injection: str
    expected: str


def read_manifest(path: Path = MANIFEST) -> list[Entry]:
    """Raises UserError for a file that is not a campaign."""
    try:
        entries = [
            Entry(int(item["row"]), item["name"], int(item["seed"]), item["injection"], item["expected"])
            for item in json.loads(path.read_text(encoding="utf-8"))
        ]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a campaign ({error}); it is a list of row, name, seed, injection, expected"
        ) from None
    unknown = sorted({entry.row for entry in entries} - rows().keys())
    if unknown:
        raise UserError(f"{path}: no row {', '.join(map(str, unknown))}; there are {', '.join(map(str, rows()))}")
    return entries


def rows() -> dict[int, Row]:
    """All `row_NN` functions of this package, by number."""
    found: dict[int, Row] = {}
    for module in pkgutil.iter_modules(faults.__path__):
        if module.name.startswith("rows_"):
            content = vars(importlib.import_module(f"{faults.__name__}.{module.name}"))
            found.update({int(name[4:]): item for name, item in content.items() if name.startswith("row_")})
    return dict(sorted(found.items()))


def run_entry(entry: Entry, material: Path, folder: Path, watchdog_s: float = _WATCHDOG_S) -> Result:
    """One case in a forked process. A case that does not end is killed with everything it started, and wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_run_case, args=(entry, material, folder))
    process.start()
    process.join(watchdog_s)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    seconds = time.monotonic() - begun
    told = folder / "result.pickle"
    if not told.is_file():
        how = f"exit code {process.exitcode}" if process.exitcode is not None else "no end"
        return Result(entry.row, entry.name, entry.seed, "wrong", (f"the case died: {how}",), seconds)
    outcome, why, figures = pickle.loads(told.read_bytes())
    return Result(entry.row, entry.name, entry.seed, outcome, tuple(why), seconds, **figures)


def _run_case(entry: Entry, material: Path, folder: Path) -> None:
    os.setpgid(0, 0)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    case = Case(entry.row, entry.seed, folder, material)
    outcome: Literal["right", "wrong", "skipped"] = "right"
    why: list[str] = []
    try:
        rows()[entry.row](case)
        why = case.failed if case.expectations else ["the row expects nothing"]
        outcome = "wrong" if why else "right"
    except Skipped as reason:
        outcome, why = "skipped", [str(reason)]
    except BaseException as error:
        traceback.print_exc()
        outcome, why = "wrong", [*case.failed, f"{type(error).__name__}: {error}"]
    figures = {"detect_s": case.detect_s, "recover_s": case.recover_s, "steps_lost": case.steps_lost}
    (folder / "result.part").write_bytes(pickle.dumps((outcome, why, figures)))
    (folder / "result.part").rename(folder / "result.pickle")
    os._exit(0)


def run_campaign(
    entries: Sequence[Entry], repeat: int = 1, scratch: Path | None = None, tell: Callable[[Result], None] | None = None
) -> list[Result]:
    """Runs every entry `repeat` times, with another seed each time."""
    from headway.bench.faults.material import make_material

    results = []
    with _scratch(scratch) as folder:
        material = make_material(folder / "material")
        for entry in entries:
            for again in range(repeat):
                seeded = Entry(entry.row, entry.name, entry.seed + 1000 * again, entry.injection, entry.expected)
                result = run_entry(seeded, material, folder / f"row-{entry.row:02d}-{seeded.seed}")
                results.append(result)
                if tell is not None:
                    tell(result)
    return results


def run_storm(kills: int, scratch: Path | None = None, seed: int = 1) -> Storm:
    """Kills one training again and again, in a process of its own that may fork the ranks."""
    from headway.bench.faults.material import make_material
    from headway.bench.faults.storm import kill_again_and_again

    with _scratch(scratch) as folder:
        material = make_material(folder / "material")
        told = folder / "storm.pickle"

        def main() -> None:
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 2)
            (folder / "storm").mkdir(exist_ok=True)
            told.write_bytes(pickle.dumps(kill_again_and_again(kills, seed, folder / "storm", material)))
            os._exit(0)

        process = multiprocessing.get_context("fork").Process(target=main)
        process.start()
        process.join()
        if not told.is_file():
            raise UserError(f"the training did not come to its end; its output is in {folder / 'log.txt'}")
        found: Storm = pickle.loads(told.read_bytes())
        return found


@contextlib.contextmanager
def _scratch(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="headway-faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


HEADER = f"{'row':>3}  {'fault':<34} {'outcome':<8} {'detect s':>8} {'recover s':>9} {'steps lost':>10} {'took s':>7}"


def line(result: Result) -> str:
    """A result as a line of the table."""
    figures = [_figure(result.detect_s, 8), _figure(result.recover_s, 9)]
    lost = "-" if result.steps_lost is None else str(result.steps_lost)
    text = (
        f"{result.row:>3}  {result.name:<34} {result.outcome:<8} {' '.join(figures)} {lost:>10} {result.seconds:>7.1f}"
    )
    return "\n".join([text, *(f"     {why}" for why in result.why)])


def _figure(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"
