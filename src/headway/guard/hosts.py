"""Which hosts have failed by themselves, and which are taken out: a list that outlives the run and can be read.

A host's count is of its own incidents (its rank was the first to fail), not of those that it was drawn into.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.account.errors import UserError
from headway.record.files import read_json, write_json
from headway.record.jsonl import complain


class Host(msgspec.Struct):
    """incidents: its own, since it was last readmitted; excluded: whether it takes part; why: the newest evidence."""

    incidents: int = 0
    excluded: bool = False
    why: list[str] = []
    since: float = 0.0


_KEPT = 10


@dataclass
class HostList:
    """hosts.json in a run folder. `limit`: own incidents after which a host is excluded."""

    path: Path
    limit: int = 3
    hosts: dict[str, Host] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.is_file():
            try:
                self.hosts = msgspec.convert(read_json(self.path), dict[str, Host])
            except (ValueError, TypeError) as error:
                raise UserError(f"{self.path}: damaged ({error}); remove it to start a new list") from error

    def blame(self, host: str, evidence: str, *, may_exclude: bool) -> bool:
        """Counts an incident of `host`; True when that excludes it. `may_exclude`: the run can go on without it."""
        entry = self.hosts.setdefault(host, Host())
        entry.incidents += 1
        entry.why = [*entry.why, evidence][-_KEPT:]
        entry.since = time.time()
        newly = may_exclude and not entry.excluded and entry.incidents >= self.limit
        entry.excluded = entry.excluded or newly
        self._save()
        return newly

    def readmit(self, host: str) -> None:
        """Raises UserError for a host that is not on the list."""
        if host not in self.hosts:
            raise UserError(f"{host} is not in {self.path}; it has {', '.join(self.hosts) or 'no host'}")
        self.hosts[host] = Host(since=time.time())
        write_json(self.path, self.to_dict())

    def excluded(self) -> set[str]:
        return {name for name, host in self.hosts.items() if host.excluded}

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.hosts)

    def _save(self) -> None:
        """A full disk must not end the supervisor: the list is in memory too, and written whole the next time."""
        try:
            write_json(self.path, self.to_dict())
        except OSError as error:
            complain(f"{self.path}: not written ({error.strerror or error}); free room there")
