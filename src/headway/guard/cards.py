"""Which cards a process may use, by the names that they have for everybody: a rank must never get another job's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
_MARK = "/cuda:"


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """The names in CUDA_VISIBLE_DEVICES (numbers, UUIDs, parts of a card); None where it is not set: all cards."""
    text = environ.get(VARIABLE)
    return None if text is None else [name.strip() for name in text.split(",")]


def card_places(host: str, ranks: int, environ: Mapping[str, str]) -> list[str]:
    """A place like "host/cuda:4" for each rank. One for which no card is visible is its host."""
    names = visible(environ)
    if names is None:
        return [f"{host}{_MARK}{rank}" for rank in range(ranks)]
    return [f"{host}{_MARK}{name}" for name in names[:ranks]] + [host] * (ranks - len(names))


def devices_of(team: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for places that name a card; nothing for others."""
    devices = [place.rpartition(_MARK)[2] for place in team if _MARK in place]
    return {VARIABLE: ",".join(devices)} if devices else {}


def card_of(local: int, environ: Mapping[str, str]) -> int | None:
    """The number that the driver gives the card of a machine's rank; None where it has another name, or none."""
    names = visible(environ)
    if names is None:
        return local
    return int(names[local]) if local < len(names) and names[local].isdigit() else None
