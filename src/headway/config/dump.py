"""A configuration as YAML that reads back to the same configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from headway.config.run import RunConfig
from headway.config.yaml_text import STR, core_tag

HEADER = "# Headway run file, resolved: every key with the value the run uses.\n"


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 (other tools) or 1.2 (Headway) would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_LINE_BREAKS = frozenset("\n\r\x85\u2028\u2029")
_PLAIN_1_1 = yaml.resolver.Resolver()


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_text = core_tag(text) == STR and _PLAIN_1_1.resolve(yaml.ScalarNode, text, (True, False)) == STR
    # Line breaks would be folded or spread over lines; in double quotes they are escaped.
    is_text = is_text and not _LINE_BREAKS.intersection(text)
    return dumper.represent_scalar(STR, text, style=None if is_text else '"')


_Dumper.add_representer(str, _represent_text)


def plain(value: Any) -> Any:
    """Paths as text and tuples as lists, at any depth: what YAML and JSON have words for."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def as_plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested plain values, every key present."""
    return plain(config.model_dump())


def dump_yaml(config: RunConfig) -> str:
    """The resolved run file: every key, in the order of the reference. Loading it gives an equal configuration."""
    return HEADER + yaml.dump(
        as_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31, default_flow_style=False
    )


def inline(value: Any) -> str:
    """One value on one line of YAML."""
    text = yaml.dump(
        plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31, default_flow_style=True
    )
    return text.removesuffix("...\n").rstrip("\n")
