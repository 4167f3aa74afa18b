"""One generation: n ranks of one command, that meet at a store of their own and end together.

The store lives outside the ranks (`rendezvous.py`). A new generation gets a new store, or a prefix of its own in one:
keys of a dead one made the next one hang. Ranks sit in process groups of their own, so that Ctrl-C at the terminal
reaches them once, through the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.guard import failure
from headway.guard.beacon import VARIABLE as BEACONS
from headway.guard.processes import Start
from headway.guard.ranks import GENERATION_VARIABLE, LAUNCHER_VARIABLE
from headway.guard.waiting import Ended, Rank, Signals, Wait, Watcher


@dataclass(frozen=True, slots=True)
class Place:
    """Where this machine's ranks stand among all: `first` is the global rank of the first one here."""

    here: int
    world: int
    first: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def run_generation(
    start: Start,
    place: Place,
    base: Mapping[str, str],
    logs: Path,
    work: Path,
    signals: Signals,
    *,
    generation: int = 0,
    grace_s: float = 5.0,
    watch: Watcher | None = None,
) -> Ended:
    """Starts the ranks, waits for all of them and says how they ended.

    `work`: a folder for this generation's beacons and failure files. One rank failing ends the others at once; a user's
    mistake after `grace_s` seconds, because all see it and rank 0 should say it. `signals`: passed on once; Ctrl-C
    behind another one kills.
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    try:
        for local in range(place.here):
            settings = rank_settings(base, local, place, work, generation)
            log = None if place.first + local == 0 else logs / f"rank-{place.first + local:05d}.log"
            size = log.stat().st_size if log is not None and log.exists() else 0
            process = start.rank(settings, log)
            ranks.append(Rank(place.first + local, process, log, size, Path(settings[failure.VARIABLE])))
        return Wait(ranks, signals, grace_s, watch).run()
    finally:
        for one in ranks:  # only what an exception left alive
            one.send(signal.SIGKILL)
            one.process.wait()


def rank_settings(base: Mapping[str, str], local: int, place: Place, work: Path, generation: int) -> dict[str, str]:
    """The environment of one rank."""
    settings = dict(base)
    rank = place.first + local
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # n ranks that each take all cores are many times slower than one.
    settings.setdefault("OMP_NUM_THREADS", str(max(1, cores // place.here)))
    settings.setdefault("PYTHONFAULTHANDLER", "1")
    if sys.platform == "linux" and place.address == "127.0.0.1":
        # Gloo otherwise looks for the interface of the host's name, which a container often cannot resolve.
        settings.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank > 0:
        settings["PYTHONUNBUFFERED"] = "1"  # the last lines before a kill are the ones that matter
    settings.update(
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.here),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
        # torch's name for "the store lives in the launcher: rank 0 must not open another".
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    settings[LAUNCHER_VARIABLE] = "local"
    settings[GENERATION_VARIABLE] = str(generation)
    settings[BEACONS] = str(work)
    settings[failure.VARIABLE] = str(work / f"rank-{rank:05d}.failure.json")
    return settings
