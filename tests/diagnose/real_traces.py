"""The shared collection's traces, each read once for all tests of a process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from headway.diagnose.diagnosis import Diagnosis, diagnose_job
from headway.diagnose.efficiency import with_efficiency
from headway.diagnose.facts import JobFacts, RankFacts
from headway.diagnose.job import Options, job_of, read_any
from headway.diagnose.said import Said
from headway.diagnose.trace import Trace

read_once = lru_cache(maxsize=None)(read_any)


def traces_of(paths: Sequence[Path]) -> list[Trace]:
    return [read_once(path) for path in paths]


def job(*paths: Path, options: Options | None = None) -> JobFacts:
    return job_of(traces_of(paths), options or Options())


def rank(path: Path, window: str = "auto") -> RankFacts:
    return job(path, options=Options(window=window)).ranks[0]


def diagnosed(*paths: Path, tokens: int | None = None) -> Diagnosis:
    return diagnose_job(with_efficiency(job(*paths), Said(tokens)))
