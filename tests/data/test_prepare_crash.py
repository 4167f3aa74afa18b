"""`prepare` killed, resumed, run twice at once, out of disk, and called again after something changed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data.chat_material import CHATML, SMOL, byte_level, conversation, write_jsonl
from headway.account.errors import UserError
from headway.data import folder as folders
from headway.data.folder import only_writer, partial_folder, recover
from headway.data.options import PrepareOptions, Progress
from headway.data.prepare import prepare
from headway.data.store import ShardFolder, part_path
from headway.data.units import finished

TOKENIZER = byte_level(CHATML)
SHARD = 700


def chats(path: Path, count: int = 40, seed: int = 0) -> Path:
    dice = random.Random(seed)
    return write_jsonl(path, [{"messages": conversation(dice)} for _ in range(count)])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_as_undisturbed(source: Path, out: Path, **options: Any) -> bool:
    """Whether a folder is byte for byte what one undisturbed run writes."""
    clean = out.with_name(f"{out.name}-clean")
    prepare(source, clean, TOKENIZER, workers=1, shard_bytes=SHARD, options=PrepareOptions(**options))
    return contents(clean) == contents(out)


def in_child(action: Callable[[], None]) -> int:
    """Run an action in a forked child; its process id. Exit status 0: done, 3: UserError, 4: anything else."""
    child = os.fork()
    if child:
        return child
    status = 4
    try:
        action()
        status = 0
    except UserError:
        status = 3
    finally:
        os._exit(status)


def killed_after(units: int, source: Path, out: Path, workers: int) -> None:
    """A prepare that is killed with SIGKILL once so many units are done."""

    def action() -> None:
        seen = []

        def progress(_: Progress) -> None:
            seen.append(1)
            if len(seen) == units:
                os.kill(os.getpid(), signal.SIGKILL)

        prepare(source, out, TOKENIZER, workers=workers, shard_bytes=SHARD, progress=progress)

    _, status = os.waitpid(in_child(action), 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not out.exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_prepare_goes_on_where_it_stopped(tmp_path: Path, workers: int) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    killed_after(3, source, out, workers)
    report = prepare(source, out, TOKENIZER, workers=workers, shard_bytes=SHARD)
    assert 3 <= report.resumed < len(report.manifest.shards)
    assert same_as_undisturbed(source, out)
    assert {p.name for p in tmp_path.iterdir()} == {"c.jsonl", "s", "s-clean"}


def test_killed_again_and_again(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    for units in (1, 3, 5):
        killed_after(units, source, out, 1)
    assert prepare(source, out, TOKENIZER, workers=1, shard_bytes=SHARD).resumed >= 4
    assert same_as_undisturbed(source, out)


def _flip(folder: Path) -> None:
    path = part_path(folder, "shard-00001", "tokens")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _tear(folder: Path) -> None:
    path = part_path(folder, "shard-00001", "mask")
    path.write_bytes(path.read_bytes()[:40])


def _lose_record(folder: Path) -> None:
    (folder / "units" / "00001.json").write_bytes(b'{"index": 1, "sou')


def _lose_rejected(folder: Path) -> None:
    (folder / "units" / "00001.rejected.jsonl").unlink()


@pytest.mark.parametrize("harm", [_flip, _tear, _lose_record, _lose_rejected])
def test_only_whole_shards_are_kept(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    killed_after(4, source, out, 1)
    harm(partial_folder(out))
    report = prepare(source, out, TOKENIZER, workers=1, shard_bytes=SHARD)
    assert report.resumed == 3  # all but the one that was harmed
    assert same_as_undisturbed(source, out)


def test_the_comparison_catches_a_planted_harm_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were shards kept by name alone, the flipped bit would be published: the test above would see it."""
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    killed_after(4, source, out, 1)
    _flip(partial_folder(out))
    wanted = {p.name: p.read_bytes() for p in (partial_folder(out) / "units").iterdir()}
    monkeypatch.setattr(
        "headway.data.units.hash_file", lambda path: json.loads(wanted["00001.json"])["rejected"]["sha256"]
    )
    monkeypatch.setattr("headway.data.prepare.finished", lambda folder, unit: _trusting(wanted, unit))
    prepare(source, out, TOKENIZER, workers=1, shard_bytes=SHARD)
    monkeypatch.undo()
    assert not same_as_undisturbed(source, out)
    with pytest.raises(UserError, match="is not what the manifest says"):
        ShardFolder.open(out).verify()


def _trusting(records: dict[str, bytes], unit: Any) -> Any:
    import msgspec

    from headway.data.units import UnitRecord

    raw = records.get(f"{unit.index:05d}.json")
    return msgspec.json.decode(raw, type=UnitRecord) if raw else None


def test_what_changed_in_between_is_done_again(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    killed_after(4, source, out, 1)
    text = source.read_text()
    at = text.index("quick", 5 * SHARD // 2)  # in the third unit or the fourth
    source.write_text(text[:at] + "QUICK" + text[at + 5 :])
    report = prepare(source, out, TOKENIZER, workers=1, shard_bytes=SHARD)
    assert report.resumed == 3
    assert same_as_undisturbed(source, out)


def test_what_became_shorter_in_between_leaves_no_stray_shard(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    killed_after(5, source, out, 1)
    source.write_text("".join(source.read_text().splitlines(keepends=True)[:5]))
    (partial_folder(out) / "shard-00000.tokens.npy.1234.tmp").write_bytes(b"of a killed worker")
    prepare(source, out, TOKENIZER, workers=1, shard_bytes=SHARD)
    assert same_as_undisturbed(source, out)


def test_other_options_begin_again_and_say_so(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    killed_after(2, source, out, 1)
    options = PrepareOptions(labels="last")
    report = prepare(source, out, TOKENIZER, workers=1, shard_bytes=SHARD, options=options)
    assert report.resumed == 0 and "begun again because it differed in: options" in report.warnings[0]
    assert same_as_undisturbed(source, out, labels="last")


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl", 100), tmp_path / "s"
    killed_after(1, source, out, 3)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _holding_lock(out):
        time.sleep(0.1)
    assert not _holding_lock(out)


def test_ctrl_c_ends_it_at_once_and_it_goes_on_later(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl", 200), tmp_path / "s"
    reading, writing = os.pipe()

    def action() -> None:
        os.setpgid(0, 0)  # Ctrl-C reaches the whole process group, as in a terminal
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def progress(_: Progress) -> None:
            os.write(writing, b"x")
            time.sleep(0.05)

        try:
            prepare(source, out, TOKENIZER, workers=2, shard_bytes=SHARD, progress=progress)
        except KeyboardInterrupt:
            os._exit(130)

    child = in_child(action)
    os.read(reading, 1)
    os.killpg(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert not out.exists()
    assert prepare(source, out, TOKENIZER, workers=2, shard_bytes=SHARD).resumed > 0
    assert same_as_undisturbed(source, out)


def _holding_lock(out: Path) -> bool:
    """Whether some process still has the lock file of an output folder open."""
    lock = str(out.with_name(f".{out.name}.lock"))
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(entry).removesuffix(" (deleted)") == lock:
                return True
        except OSError:
            continue
    return False


# -- two at once -------------------------------------------------------------------------------------------------------


def test_the_second_of_two_prepares_is_refused_and_the_first_is_unharmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    started, go = os.pipe(), os.pipe()

    def action() -> None:
        def progress(event: Progress) -> None:
            os.write(started[1], b"x")
            os.read(go[0], 1)

        prepare(source, out, TOKENIZER, workers=1, shard_bytes=1 << 20, progress=progress)

    child = in_child(action)
    os.read(started[0], 1)
    monkeypatch.setattr(folders, "_PATIENCE", 0.2)
    with pytest.raises(UserError, match=rf"s: another `headway data prepare` \(process {child}\) is writing it; wait"):
        prepare(source, out, TOKENIZER, workers=1)
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert prepare(source, out, TOKENIZER, workers=1).reused


def test_many_at_once_end_with_one_sound_folder(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    children = [
        in_child(lambda: prepare(source, out, TOKENIZER, workers=2, shard_bytes=SHARD) and None) for _ in range(4)
    ]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert 0 in statuses and set(statuses) <= {0, 3}
    assert same_as_undisturbed(source, out)
    assert not out.with_name(".s.lock").exists() and not partial_folder(out).exists()


def test_a_lock_file_left_behind_holds_nobody_up(tmp_path: Path) -> None:
    out = tmp_path / "s"
    out.with_name(".s.lock").write_text("99999\n")
    with only_writer(out):
        assert out.with_name(".s.lock").exists()
    assert not out.with_name(".s.lock").exists()


def test_a_lock_on_a_file_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder removes the file just between our opening and our locking it."""
    out, lock, real = tmp_path / "s", tmp_path / ".s.lock", fcntl.flock
    removed: list[int] = []

    def flock(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(1)
            lock.unlink()
        real(descriptor, how)

    monkeypatch.setattr("headway.data.folder.fcntl.flock", flock)
    with only_writer(out), lock.open() as other, pytest.raises(BlockingIOError):
        real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- no space ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skips where mounting one is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("not allowed to mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_publishes_nothing_and_can_go_on(small_disk: Path, tmp_path: Path, workers: int) -> None:
    source, out = chats(tmp_path / "c.jsonl", 600), small_disk / "s"
    with pytest.raises(UserError, match=r"s: the disk is full \(0 MiB free\); nothing was published, finished shards"):
        prepare(source, out, TOKENIZER, workers=workers, shard_bytes=1 << 14)
    assert not out.exists()
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    report = prepare(source, out, TOKENIZER, workers=workers, shard_bytes=1 << 14)
    assert report.resumed > 0
    prepare(source, tmp_path / "clean", TOKENIZER, workers=1, shard_bytes=1 << 14)
    assert contents(out) == contents(tmp_path / "clean")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_planted_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    source, out, real = chats(tmp_path / "c.jsonl"), tmp_path / "s", os.fsync
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(1)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("headway.data.shards.os.fsync", fsync)
    with pytest.raises(UserError, match="the disk is full"):
        prepare(source, out, TOKENIZER, workers=workers, shard_bytes=SHARD)
    monkeypatch.undo()
    assert not out.exists()
    assert prepare(source, out, TOKENIZER, workers=workers, shard_bytes=SHARD).resumed > 0
    assert same_as_undisturbed(source, out)


def test_what_cannot_fit_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="at least 0 MiB are needed and 0 MiB are free; nothing was written"):
        prepare(source, out, TOKENIZER, workers=1)
    assert not partial_folder(out).exists()


def test_other_errors_of_the_system_stay_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("headway.data.shards.os.fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        prepare(chats(tmp_path / "c.jsonl"), tmp_path / "s", TOKENIZER, workers=1)


def test_a_killed_worker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.data.units.do_unit", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="a worker process was killed, most likely for want of memory"):
        prepare(chats(tmp_path / "c.jsonl"), tmp_path / "s", TOKENIZER, workers=2, shard_bytes=SHARD)


# -- called again ------------------------------------------------------------------------------------------------------


def test_the_same_again_does_nothing(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    first = prepare(source, out, TOKENIZER, workers=1, shard_bytes=SHARD)
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    again = prepare(source, out, TOKENIZER, workers=2)  # neither workers nor shard size are a change
    assert again.reused and again.manifest == first.manifest and again.warnings == first.warnings
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before


def _one_byte(source: Path) -> None:
    text, stamp = source.read_text(), source.stat()
    source.write_text(text.replace("quick", "quack", 1))
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same time


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: _one_byte(t / "c.jsonl") or {}, r"c.jsonl changed"),
        (lambda t: {"tokenizer": byte_level(CHATML, eos="</s>")}, r"the tokenizer changed \(.*\)"),
        (lambda t: {"tokenizer": byte_level(SMOL)}, r"the chat template changed \(tokenizer\)"),
        (lambda t: {"options": PrepareOptions(labels="last")}, r"data.labels changed from all to last"),
        (lambda t: {"options": PrepareOptions(text_eos=False)}, r"data.text_eos changed from True to False"),
        (lambda t: {"sources": [t / "c.jsonl", chats(t / "d.jsonl", 2)]}, r"d.jsonl is new"),
        (lambda t: {"sources": [chats(t / "d.jsonl", 2)]}, r"c.jsonl is no longer among the sources"),
        (lambda t: part_path(t / "s", "shard-00000", "mask").unlink() or {}, r"the folder is damaged: .* missing"),
    ],
)
def test_a_change_is_noticed_and_made_again(tmp_path: Path, change: Any, reason: str) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    prepare(source, out, TOKENIZER, workers=1, shard_bytes=5000)
    inputs = {"sources": source, "tokenizer": TOKENIZER, "options": None, **change(tmp_path)}
    told: list[tuple[str, ...]] = []
    call = {"out": out, "workers": 1, "shard_bytes": 5000, "progress": lambda p: told.append(p.reasons)}
    report = prepare(inputs["sources"], tokenizer=inputs["tokenizer"], options=inputs["options"], **call)
    assert not report.reused
    assert len(report.reasons) <= 2 and any(re.search(reason, r) for r in report.reasons), report.reasons
    assert told[-1] == tuple(report.reasons)  # told while it works, not only afterwards
    clean = tmp_path / "clean"
    prepare(inputs["sources"], clean, inputs["tokenizer"], options=inputs["options"], workers=1, shard_bytes=5000)
    assert contents(out) == contents(clean)
    assert not {p.name for p in tmp_path.iterdir()} & {".s.old", ".s.partial", ".s.lock"}


def test_a_failed_remake_leaves_the_old_folder(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    prepare(source, out, TOKENIZER, workers=1)
    before = contents(out)
    source.write_text("{\n" * 50 + '{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(UserError, match="50 of 51 records are bad"):
        prepare(source, out, TOKENIZER, workers=1)
    assert contents(out) == before


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_in_use_is_swapped_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    prepare(source, out, TOKENIZER, workers=1)
    store = ShardFolder.open(out)
    before = [store.tokens(d).tolist() for d in range(len(store))]
    chats(source, 10, seed=9)
    prepare(source, out, TOKENIZER, workers=1)
    assert [store.tokens(d).tolist() for d in range(len(store))] == before  # the mapped files are still the old ones
    assert len(ShardFolder.open(out)) == 10
    assert {p.name for p in tmp_path.iterdir()} == {"c.jsonl", "s"}


def test_a_death_between_two_renames_is_mended(tmp_path: Path) -> None:
    out = tmp_path / "s"
    prepare(chats(tmp_path / "c.jsonl"), out, TOKENIZER, workers=1)
    before = contents(out)
    out.rename(tmp_path / ".s.old")
    recover(out)
    assert contents(out) == before
    (tmp_path / ".s.old").mkdir()
    recover(out)
    assert contents(out) == before and not (tmp_path / ".s.old").exists()


def test_the_atomic_exchange_is_there_on_linux(tmp_path: Path) -> None:
    if not hasattr(ctypes.CDLL(None), "renameat2"):
        pytest.skip("no renameat2")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    assert folders._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()


def test_a_unit_is_only_finished_for_the_source_it_was_made_from(tmp_path: Path) -> None:
    from headway.data.readers import FileReader
    from headway.data.sources import expand
    from headway.data.units import cut_units

    source, out = chats(tmp_path / "c.jsonl"), tmp_path / "s"
    killed_after(2, source, out, 1)
    (found,), _ = expand([source])
    units = list(cut_units([FileReader(found, 0, target=SHARD)], SHARD))
    assert finished(partial_folder(out), units[0]) is not None
    units[0].chunks[0].first += 1  # the same bytes at another line
    assert finished(partial_folder(out), units[0]) is None
