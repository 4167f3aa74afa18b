"""Makes the folder's helpers importable from its tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests use run ids over and over; their memory checkpoints must not meet."""
    import shutil
    import tempfile

    base = Path(tempfile.mkdtemp(prefix="headway-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    monkeypatch.setenv("HEADWAY_SHARED_MEMORY", str(base))
    yield
    shutil.rmtree(base, ignore_errors=True)
