"""Two trainings never share a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.guard.folder_lock import FolderLock


def test_the_second_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(UserError, match="another training runs"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()
