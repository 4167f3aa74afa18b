"""JSON for machines, the same way in every command."""

from __future__ import annotations

from typing import Any

import orjson


def print_json(value: Any) -> None:
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    print(orjson.dumps(value, option=options, default=str).decode())
