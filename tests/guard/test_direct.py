"""Copies past the page cache are the same bytes, on file systems that know O_DIRECT and on those that do not."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.guard import direct
from headway.guard.hashing import first_difference, hash_bytes

SIZES = (0, 1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (8 << 20) + 4096, (17 << 20) + 123)


@pytest.fixture(params=["disk", "shared memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        made = Path(tempfile.mkdtemp(dir=os.environ["HEADWAY_SHARED_MEMORY"]))
        yield made
        shutil.rmtree(made)


def copied(folder: Path, size: int) -> tuple[Path, Path]:
    source, target = folder / "source", folder / "target"
    source.write_bytes(random.Random(size).randbytes(size))
    target.unlink(missing_ok=True)
    told: list[int] = []
    with source.open("rb") as file:
        direct.copy(file.fileno(), target, lambda done, size: told.append(done))
    assert told == sorted(told)
    return source, target


def test_every_byte_arrives_whatever_the_size(folder: Path) -> None:
    for size in SIZES:
        source, target = copied(folder, size)
        assert target.read_bytes() == source.read_bytes()
        found, meant = direct.hash_file(target), hash_bytes(source.read_bytes())
        assert (found, found.marks) == (meant, meant.marks)


@pytest.mark.parametrize("at", [0, 2 << 20, (17 << 20) + 122])
def test_a_byte_that_changed_on_the_disk_is_seen(tmp_path: Path, at: int) -> None:
    source, target = copied(tmp_path, (17 << 20) + 123)
    content = source.read_bytes()
    meant = hash_bytes(content)
    with target.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
        file.flush()
        found = direct.hash_file(target)
        block = first_difference(found, meant)
        assert found != meant and block is not None and block.start <= at < block.end
        file.truncate(at)
        assert direct.hash_file(target) == hash_bytes(content[:at]) != meant


def test_other_blocks_than_expected_and_short_writes_take_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, []

    def odd(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "planted")
        return real(descriptor, data[: 1000 if len(calls) == 2 else len(data)], offset)

    monkeypatch.setattr(direct.os, "pwrite", odd)
    source, target = copied(tmp_path, 9 << 20)
    monkeypatch.undo()
    assert target.read_bytes() == source.read_bytes() and calls[:3] == [0, 0, 1000]


@pytest.mark.parametrize("moment", ["before the next piece", "within a piece"])
def test_a_source_that_becomes_shorter_is_an_error_not_a_death(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "source"
    source.write_bytes(bytes(17 << 20))
    real = os.pwrite

    def cut(descriptor: int, data: memoryview, offset: int) -> int:
        if moment == "within a piece":
            os.truncate(source, offset + 4096)
            return real(descriptor, data, offset)
        done = real(descriptor, data, offset)
        os.truncate(source, offset + 4096)
        return done

    monkeypatch.setattr(direct.os, "pwrite", cut)
    with source.open("rb") as file, pytest.raises(OSError, match="became shorter"):
        direct.copy(file.fileno(), folder / "target", lambda done, size: None)


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(direct.os, "pwrite", full)
    with pytest.raises(OSError, match="planted"):
        copied(tmp_path, 2 << 20)
