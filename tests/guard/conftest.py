"""Makes the folder's helpers importable from its tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests use run ids over and over; their memory checkpoints must not meet."""
    base = Path(os.environ["HEADWAY_SHARED_MEMORY"], tmp_path.name)
    base.mkdir(exist_ok=True)
    monkeypatch.setenv("HEADWAY_SHARED_MEMORY", str(base))
