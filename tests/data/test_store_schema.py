"""The manifest's schema is frozen: other rooms and older folders depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from data.test_store import TWO, write_folder
from golden_file import assert_golden
from headway.data import manifest as manifests
from headway.data.manifest import Manifest


def test_the_manifest_is_frozen(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "s", TWO)
    content: Any = msgspec.json.decode((folder / manifests.NAME).read_bytes())
    assert_golden("data_manifest.json", content)


def test_the_types_are_frozen() -> None:
    assert_golden("data_manifest_schema.json", msgspec.json.schema(Manifest))


def test_the_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "s", TWO)
    raw = (folder / manifests.NAME).read_bytes()
    assert manifests.encode(manifests.read(folder)) == raw
