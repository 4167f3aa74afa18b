"""Which known device a name means: `NVIDIA H100 80GB HBM3`, `A100-40G`, `Instinct MI300X OAM`, `GB200 NVL72`.

One rule: the model number decides the family; the form factor (PCIe or NVL card, else the socketed one) and the nearest
memory decide inside it. A family that is not known has no device: a neighbour's facts would look like an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# A model number: letters and digits such as h100, gb200, mi300x, a10g, l40s, rtx4090, v5e, gaudi2, trn2.
_NUMBER = re.compile(
    r"(?:tpu)?v(?:5e|5p|6e|7x|[2-7])(?![0-9a-z])|gh200|gb[23]00|mi\d{3}[axp]?|rtx(?:pro)?a?\d{4}|[ahbvlpt]\d{1,3}[gs]?(?![0-9])"
    r"|gaudi\d|trainium\d?|trn\d|ascend\d{3}[a-z]*|rubin",
)
_MEMORY = re.compile(r"(\d{2,3})\s*g(?:i?b)?(?![a-z0-9])")
_SAME = {"trn1": "trainium1", "trn2": "trainium2", "v7": "v7x", "mi300": "mi300x", "mi325": "mi325x", "mi355": "mi355x"}


def match_device(name: str, known: Mapping[str, float]) -> str | None:
    """The name in `known` (with its memory in GB) that `name` means by the rule above, or None."""
    wanted = family(name)
    if wanted is None:
        return None
    found = [one for one in known if family(one) == wanted]
    found = _same_form(found, form_of(name))
    size = memory_gb(name)
    if size is None:
        return found[0] if found else None  # the family's first row is its usual member
    return min(found, key=lambda one: abs(known[one] - size), default=None)


def _same_form(found: list[str], form: str) -> list[str]:
    """Those of that form, else (for a card) any card, else all."""
    cards = [one for one in found if form_of(one)] if form else []
    return [one for one in found if form_of(one) == form] or cards or found


def family(name: str) -> str | None:
    """`h100` of any way to write one."""
    text = re.sub(r"geforce|nvidia|amd|instinct|tesla|google|intel|habana|aws|cloud", " ", name.casefold())
    joined = re.sub(r"[\s_\-]+", "", text)
    for spaced in (re.sub(r"[\s_\-]+", " ", text), joined):
        match = _NUMBER.search(spaced if spaced != joined else joined)
        if match and not _inside_word(spaced, match):
            number = match[0].removeprefix("tpu")
            return _SAME.get(number, number)
    return None


def _inside_word(text: str, match: re.Match[str]) -> bool:
    """`xh100` is not an h100; a count before it (8xH100, 8 H100) is."""
    before = text[: match.start()]
    return bool(before) and before[-1].isalpha() and not re.search(r"\dx$|dgx$|hgx$|tpu$", before)


def form_of(name: str) -> str:
    """`pcie` for a card, `nvl` for cards joined by a bridge, empty for the socketed part."""
    text = name.casefold()
    return "pcie" if "pci" in text else "nvl" if re.search(r"(?<![a-z])nvl(?!\s*-?(?:36|72|144))", text) else ""


def memory_gb(name: str) -> float | None:
    match = _MEMORY.search(name.casefold())
    return float(match[1]) if match else None
