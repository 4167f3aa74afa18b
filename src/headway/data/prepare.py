"""`headway data prepare`: files of chats or text -> a folder of shards, once, offline, exactly.

The reading process cuts the sources into units; each unit becomes one shard, in any worker, from its own bytes alone.
So the result does not depend on the number of workers, a run that was killed goes on where it stopped, and a unit whose
source changed is done again.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.data import folder as folders
from headway.data import manifest as manifests
from headway.data.finish import check_rejected, check_replaceable, publish, warnings_of
from headway.data.job import Job, reasons_to_rebuild, size_of, start_partial
from headway.data.manifest import Totals
from headway.data.options import PrepareOptions, PrepareReport, Progress
from headway.data.readers import FileReader
from headway.data.sources import expand
from headway.data.tokenizer import load_templates, open_tokenizer, take_apart
from headway.data.units import (
    Recipe,
    Unit,
    UnitRecord,
    cut_units,
    do_unit,
    finished,
    rejected_path,
    start_worker,
    unit_bytes,
    work,
)

__all__ = ["PrepareOptions", "PrepareReport", "Progress", "prepare"]

#: A share of bad records this high among this many is no accident; the rest need not be read.
_HOPELESS_RECORDS, _HOPELESS_SHARE = 1000, 0.5


def prepare(
    sources: str | Path | Iterable[str | Path],
    out: str | Path,
    tokenizer: Any,
    *,
    options: PrepareOptions | None = None,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    shard_bytes: int | None = None,
    tokenizer_key: str = "tokenizer",
) -> PrepareReport:
    """Tokenise and label sources into a folder of shards, or find that this was done.

    ``sources``: files, folders, globs. ``tokenizer``: a path, name, .gguf file, or a transformers tokenizer.
    ``workers``: processes, by default one per core this process may use. ``shard_bytes``: source bytes per shard.
    ``tokenizer_key``: what the user set the tokenizer with, for messages.

    Raises:
        UserError: bad sources, options or template, too many bad records, nothing to train on, a full disk, or another
            prepare at work on ``out``. Nothing is published then; finished shards are kept for the next call.
    """
    options = options or PrepareOptions()
    paths, foreign = expand([sources] if isinstance(sources, (str, Path)) else sources)
    opened = open_tokenizer(tokenizer, key=tokenizer_key)
    info = take_apart(opened, str(tokenizer) if isinstance(tokenizer, (str, Path)) else "")
    where, templates = load_templates(info, options.chat_template, options.template_options, options.template_date)
    total = size_of(paths)
    target = Path(out).expanduser().absolute()
    size = shard_bytes or unit_bytes(total)
    job = Job(target, paths, total, size, info, opened, where, templates, options)
    run = _Run(job, workers or len(os.sched_getaffinity(0)), progress)
    with folders.only_writer(target):
        folders.recover(target)
        reasons: list[str] = []
        if folders.check_target(target):
            manifest = manifests.read(target)
            reasons = reasons_to_rebuild(job, manifest, run.compared)
            if not reasons:
                check_rejected(manifest.totals, options.max_bad, target / manifests.REJECTED, job.paths)
                return run.report(manifest, reasons, foreign, reused=True)
            check_replaceable(target, manifest)
        run.reasons = tuple(reasons)
        with folders.full_disk(target, job.partial):
            folders.check_space(target, job.partial, total)
            begun_again = start_partial(job)
            readers = [FileReader(s, i, fmt=options.format, target=size) for i, s in enumerate(paths)]
            records = run.all_units(cut_units(readers, size))
            manifest = publish(job, readers, records)
    return run.report(manifest, reasons, foreign, extra=[begun_again] if begun_again else [])


class _Run:
    """One call at work: hands units out, collects their records, tells how far it is."""

    def __init__(self, job: Job, workers: int, progress: Callable[[Progress], None] | None) -> None:
        self.job = job
        self.workers = workers
        self.progress = progress
        self.reasons: tuple[str, ...] = ()
        self.resumed = 0
        self._began = self._stage_began = time.monotonic()
        self._stage = "comparing"
        self._bytes = 0
        self._compared = 0
        self._totals = Totals()
        self._records: list[UnitRecord] = []

    def all_units(self, units: Iterator[Unit]) -> list[UnitRecord]:
        """Every unit done, in order."""
        recipe = self.job.recipe()
        first = list(islice(units, 2))
        units = chain(first, units)
        if self.workers == 1 or len(first) < 2:
            converter = recipe.converter()
            for unit in self._unfinished(units):
                self._done(do_unit(recipe, converter, unit), unit.bytes)
        else:
            self._in_pool(recipe, units)
        return sorted(self._records, key=lambda record: record.index)

    def _in_pool(self, recipe: Recipe, units: Iterator[Unit]) -> None:
        # Forked workers start at once; spawned ones import the library first, which takes seconds. They touch neither
        # torch nor CUDA.
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        pool = ProcessPoolExecutor(self.workers, context, start_worker, (recipe, os.getpid()))
        running: dict[Future[UnitRecord], int] = {}
        try:
            for unit in self._unfinished(units):
                running[pool.submit(work, unit)] = unit.bytes
                del unit  # one more than the workers hold is all the source there is in memory
                while len(running) > self.workers:
                    self._collect(running)
            while running:
                self._collect(running)
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, most likely for want of memory; give fewer --workers and run it again: "
                "finished shards are kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _collect(self, running: dict[Future[UnitRecord], int]) -> None:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            self._done(future.result(), running.pop(future))

    def _unfinished(self, units: Iterator[Unit]) -> Iterator[Unit]:
        for unit in units:
            record = finished(self.job.partial, unit)
            if record is None:
                yield unit
            else:
                self.resumed += 1
                self._done(record, unit.bytes)

    def _done(self, record: UnitRecord, size: int) -> None:
        self._records.append(record)
        self._bytes += size
        self._totals = sum(record.files.values(), self._totals)
        rejected, records = self._totals.rejected, self._totals.rejected + self._totals.documents
        limit = max(_HOPELESS_SHARE, self.job.options.max_bad)
        if records >= _HOPELESS_RECORDS and rejected > limit * records:
            bad = next(r for r in self._records if any(t.rejected for t in r.files.values()))
            listed = rejected_path(self.job.partial, bad.index)
            check_rejected(self._totals, self.job.options.max_bad, listed, self.job.paths)
        self._tell("tokenising", self._bytes)

    def compared(self, size: int) -> None:
        """Told by the comparison with a folder that is there: so many bytes of source were hashed."""
        self._compared += size
        self._tell("comparing", self._compared)

    def _tell(self, stage: str, done: int) -> None:
        if self.progress:
            now = time.monotonic()
            if stage != self._stage:
                self._stage, self._stage_began = stage, now
            seconds = now - self._stage_began
            self.progress(Progress(stage, done, self.job.total_bytes, self._totals, seconds, self.reasons))

    def report(
        self,
        manifest: manifests.Manifest,
        reasons: list[str],
        foreign: list[Path],
        *,
        reused: bool = False,
        extra: list[str] | None = None,
    ) -> PrepareReport:
        """What is told at the end."""
        return PrepareReport(
            out=self.job.out,
            manifest=manifest,
            reused=reused,
            reasons=reasons,
            resumed=self.resumed,
            warnings=[*(extra or []), *warnings_of(manifest, foreign, self.job.out)],
            seconds=time.monotonic() - self._began,
            workers=self.workers,
        )
