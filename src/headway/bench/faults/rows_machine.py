"""Rows about data readers and the network."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from typing import Any

from headway.bench.faults.case import Case
from headway.bench.faults.poor_link import PoorLink
from headway.bench.faults.small_run import Strike, same_documents, step_times, train_on_hosts, train_small, twin
from headway.data.batch import BatchBuilder
from headway.guard.hosts import HostList
from headway.guard.memory import NODE

_CLONE_NEWNET = 0x40000000
_PARTITION_S = 2.0


def row_27(case: Case) -> None:
    """A data reader fails, then is slow; a process that builds batches is killed, another has no memory left: all are
    told as data's, and no document comes twice or never."""
    step, victim = case.dice.randint(4, 8), case.dice.randrange(2)

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("reader"):
            _break(at.run.supply, slow_s=1.6)

    run = train_small(case, "reader", fault, "data.prefetch=1")
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    case.expect(run.losses() == twin(case).losses(), "losses hex-equal to the twin's")
    case.expect(run.faults()[:1] == ["data reader failed"], f"the failure is the data reader's, not {run.faults()}")
    case.expect("slow data" in run.faults(), f"slowness is told too: {run.faults()}")
    case.expect(all(item.rank == victim for item in run.incidents), "the rank is named")
    case.expect(len(run.history.sessions) == 1, "no rank was restarted")
    for incident in run.incidents[:1]:
        case.expect("started again at document" in incident.action, "the ledger says where it went on")
        case.measured(recover_s=incident.seconds_lost, steps_lost=0)
    _a_building_process_goes(case)


def _a_building_process_goes(case: Case) -> None:
    step, victim, full = case.dice.randint(3, 5), case.dice.randrange(2), case.folder / "full"
    build: Any = BatchBuilder.packed

    def without_memory(*words: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            full.unlink()
            raise MemoryError
        return build(*words)

    def fault(at: Strike) -> None:
        if at.rank == victim and at.step == step and at.once("builder"):
            os.kill(at.run.supply._feeder._builder.pid, signal.SIGKILL)  # type: ignore[union-attr, arg-type]
        if at.rank == victim and at.step == step + 4 and at.once("memory"):
            full.touch()

    builder: Any = BatchBuilder
    builder.packed = without_memory
    run = train_small(case, "builder", fault, "data.prefetch=1", "data.loader=process")
    builder.packed = build
    case.expect(run.code == 0 and len(run.history.sessions) == 1, f"no rank was restarted: {run.code}")
    failed = [item for item in run.incidents if item.fault == "data reader failed"]
    case.expect(len(failed) == 2, f"both are failures of the reader: {run.faults()}")
    said = [item.evidence for item in failed]
    case.expect(["signal 9" in text for text in said] == [True, False], f"the kill is told: {said}")
    case.expect(["no memory" in text for text in said] == [False, True], f"and the want of memory: {said}")
    case.expect(run.losses() == twin(case).losses(), "losses hex-equal to the twin's: nothing twice, nothing left out")


def _break(supply: Any, slow_s: float) -> None:
    """The next read fails as a network disk's does; the one after it takes long."""
    stream = supply._feeder._stream
    real, calls = stream.global_batch, []

    def broken(position: Any) -> Any:
        calls.append(position)
        if len(calls) == 1:
            raise OSError(121, "Remote I/O error (planted)")
        if len(calls) == 4:
            time.sleep(slow_s)
        return real(position)

    # The stream is frozen, and shared by the reader that is started again.
    object.__setattr__(stream, "global_batch", broken)


def row_29(case: Case) -> None:
    """A host is cut off: the others go on, it stops and comes back. Its line is late and loses packets, or is gone for
    two seconds: that heals.

    The last part needs the privilege to make a network namespace.
    """
    _a_host_is_cut_off(case)
    _a_poor_link(case)
    able = os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare")))
    if able and not subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        _the_link_is_gone_for_a_while(case)


def _a_host_is_cut_off(case: Case) -> None:
    """The agent of one of two hosts stands still until the leading one has gone on for some steps."""
    step, note = case.dice.randint(5, 7), case.folder / "agent"
    saves = case.folder / "hosts" / "checkpoints"

    def fault(at: Strike) -> None:
        if os.environ[NODE] == "two" and at.step == step and at.once("cut"):
            note.write_text(str(os.getppid()))
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(60)  # the agent would say no more of this rank, whatever it did
        if at.generation == 1 and at.rank == 0:
            if at.step == 8 and at.once("awake"):
                os.kill(int(note.read_text()), signal.SIGCONT)
            time.sleep(0.8 if at.step > 8 else 0.0)

    names, listed = ("one", "two"), HostList(case.folder / "hosts.json")
    run, codes = train_on_hosts(case, "hosts", fault, names, fewest=1, hosts=listed)
    case.expect(codes == dict.fromkeys(names, 0), f"every agent ends well, not {codes}")
    told = [(item.fault, item.host) for item in run.incidents]
    case.expect(told == [("host lost", "two")], f"one incident, the host's, not {told}")
    worlds = [session.start.world_size for session in run.history.sessions]
    case.expect(worlds == [2, 1, 2], f"2 ranks, 1, and 2 again, not {worlds}")
    whole = twin(case).history.kept
    case.expect(
        same_documents(run.history.kept, whole), "the same documents in every step, and the loss within rounding"
    )
    case.expect(not list(saves.glob(".partial-*")), "nothing half-made is left")
    for incident in run.incidents[:1]:
        case.from_incident(incident)


def _a_poor_link(case: Case) -> None:
    """Each piece between one host and the leader's store is 50 ms late, one in twenty a resend later."""
    links: list[PoorLink] = []

    def through(port: int) -> int:
        links.append(PoorLink(port, case.seed))
        return links[-1].port

    run, codes = train_on_hosts(case, "late", None, ("one", "two"), through=through)
    for link in links:
        link.close()
    case.expect(codes == {"one": 0, "two": 0}, f"every agent ends well, not {codes}")
    case.expect(run.incidents == [] and len(run.history.sessions) == 1, f"no alarm, no restart: {run.faults()}")
    case.expect(run.losses() == twin(case).losses(), "losses hex-equal to the twin's")


def _the_link_is_gone_for_a_while(case: Case) -> None:
    undisturbed = twin(case).losses()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        return
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def fault(at: Strike) -> None:
        if at.rank == 0 and at.step == 4 and at.once("partition"):
            subprocess.Popen(["sh", "-c", f"ip link set lo down; sleep {_PARTITION_S}; ip link set lo up"])

    run = train_small(case, "partition", fault, hang_least_s=20.0)
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    case.expect(run.incidents == [] and len(run.history.sessions) == 1, f"it heals without a restart: {run.faults()}")
    case.expect(run.losses() == undisturbed, "losses hex-equal to the twin's")
    longest = max(step_times(run.history)[3:])
    case.expect(longest > _PARTITION_S / 2, f"the partition was felt (longest step {longest:.2f} s)")
