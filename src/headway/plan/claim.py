"""Do these figures fit together? What a claim about a training run says, read from a file or from key=value pairs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from headway.account.errors import UserError
from headway.plan.cluster import Device
from headway.plan.numbers import AMOUNT, COUNT, GPUS, INSIDE, POSITIVE, RANKS, Kind
from headway.plan.reading import yaml_of

Verdict = Literal["fits", "does not fit", "follows", "possible", "impossible"]

_NUMBERS = (
    "gpus", "parameters", "active_parameters", "global_batch", "seq", "micro_batch", "micro_batches",
    "step_s", "mfu", "later_step_s", "tokens_per_s", "samples",
)  # fmt: skip
_GROUPS: dict[str, tuple[str, ...] | None] = {
    "account": None,
    "tp_communication": ("from", "to", "ratio", "pp_from", "pp_to"),
    "before": ("seconds", "tokens_per_s"),
    "after": ("seconds", "tokens_per_s"),
}
_PLAN = ("tp", "pp", "dp", "bubble", "vpp")
_COUNTS = ("gpus", "global_batch", "seq", "micro_batch", "tp", "pp", "dp", "vpp")
_KEYS = ("name", "device", "devices", "precision", *_NUMBERS, *_GROUPS, "plans")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was compared, the verdict, and the arithmetic in words.

    `follows` says what the figures imply; `possible` and `impossible` are answers to what the claim leaves open.
    """

    what: str
    verdict: Verdict
    says: str

    def line(self) -> str:
        return f"[{self.verdict}] {self.what}: {self.says}"


@dataclass(frozen=True)
class Claim:
    """The figures of a claim; None (or empty) where it says nothing. Shares 0 to 1, seconds, plain counts."""

    name: str = "claim"
    device: str | None = None
    devices: tuple[str, ...] = ()
    precision: str = "bf16"
    numbers: Mapping[str, float] = field(default_factory=dict)
    account: Mapping[str, float] = field(default_factory=dict)
    tp_communication: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    plans: tuple[Mapping[str, float], ...] = ()

    def get(self, *names: str) -> list[float] | None:
        """These numbers, or None when one of them was not claimed."""
        found = [self.numbers.get(name) for name in names]
        return [value for value in found if value is not None] if None not in found else None


def rate_of(device: Device, precision: str) -> float:
    """Peak FLOP/s of one device. Raises UserError naming the precisions that are known."""
    if precision not in device.rates:
        raise UserError(f"{device.name}: no {precision!r} peak is known; known: {', '.join(device.rates)}")
    return device.rates[precision]


def known_claims() -> list[str]:
    folder = resources.files("headway.plan").joinpath("claims")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_claim(words: Sequence[str]) -> Claim:
    """A claim from a YAML file, from the name of one that comes with Headway, or from key=value words.

    Later words add to earlier ones. Raises UserError naming the key and what is known.
    """
    content: dict[str, Any] = {}
    where = "claim"
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not Path(word).is_file():
            _put(content, key, value)
            continue
        where = word
        content.update(_read(word))
    return claim_from(content, where)


def claim_from(content: Mapping[str, Any], where: str) -> Claim:
    for key in content:
        _known(str(key), _KEYS, where)
    groups: dict[str, Any] = {}
    for name, keys in _GROUPS.items():
        group = content.get(name, {})
        if not isinstance(group, Mapping):
            raise UserError(f"{where}: key {name!r} needs a mapping of numbers")
        for key in group:
            if keys:
                _known(str(key), keys, f"{where}: {name}")
        groups[name] = {
            str(key): _number(value, f"{where}: {name}.{key}", _kind(str(key), name)) for key, value in group.items()
        }
    plans = content.get("plans", [])
    if not isinstance(plans, list) or not all(isinstance(plan, Mapping) for plan in plans):
        raise UserError(f"{where}: key 'plans' needs a list of mappings, e.g. [{{tp: 8, pp: 32, bubble: 0.12}}]")
    for plan in plans:
        for key in plan:
            _known(str(key), _PLAN, f"{where}: plans")
    devices = content.get("devices", [])
    return Claim(
        name=str(content.get("name", where)),
        device=str(content["device"]) if "device" in content else None,
        devices=tuple(map(str, devices if isinstance(devices, list) else [devices])),
        precision=str(content.get("precision", "bf16")),
        numbers={name: _number(content[name], f"{where}: {name}", _kind(name)) for name in _NUMBERS if name in content},
        plans=tuple({str(k): _number(v, f"{where}: plans.{k}", _kind(k)) for k, v in plan.items()} for plan in plans),
        **groups,
    )


def _read(word: str) -> dict[str, Any]:
    path = Path(word)
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    elif word in known_claims():
        text = resources.files("headway.plan").joinpath("claims", f"{word}.yaml").read_text(encoding="utf-8")
    else:
        raise UserError(f"claim {word!r} is no file; known by name: {', '.join(known_claims())}; or give key=value")
    content = yaml_of(text, word)
    if not isinstance(content, dict):
        raise UserError(f"{word}: a claim is a mapping with keys such as {', '.join(_KEYS[:6])}")
    return content


def _put(content: dict[str, Any], key: str, value: str) -> None:
    top, _, below = key.partition(".")
    parsed = yaml_of(value, f"claim: {key}")
    if not below:
        content[top] = parsed
        return
    group = content.setdefault(top, {})
    if not isinstance(group, dict):
        raise UserError(f"claim: {top!r} is one value, so {key!r} has no place")
    group[below] = parsed


def _known(key: str, keys: Sequence[str], where: str) -> None:
    if key not in keys:
        near = difflib.get_close_matches(key, keys, n=3, cutoff=0.4) or keys
        raise UserError(f"{where}: key {key!r} is unknown; nearest: {', '.join(near)}")


def _kind(name: str, group: str = "") -> Kind:
    """What a figure of this name must be: what divides must not be nothing."""
    if group == "account":
        return AMOUNT  # a part of a step may be nothing
    if group == "tp_communication" and name != "ratio":
        return COUNT if name.startswith("pp_") else RANKS
    if name in _COUNTS:
        return GPUS if name == "gpus" else COUNT
    return INSIDE if name in ("bubble", "mfu") else POSITIVE


def _number(value: Any, where: str, kind: Kind) -> float:
    try:
        return float(kind.read(value))
    except ValueError:
        raise UserError(f"{where} is {value!r}; give {kind.says}") from None
