"""Rows about ranks and the supervisor: killed, stopped, failing again and again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from headway.bench.faults.case import Case
from headway.bench.faults.small_run import Strike, same_documents, train_on_hosts, train_small, twin
from headway.diagnose.diagnosis import diagnose_run
from headway.diagnose.run_facts import read_run
from headway.guard.hosts import HostList
from headway.guard.memory import NODE
from headway.guard.oom import OomCounter
from headway.guard.watching import BUSY


def row_01(case: Case) -> None:
    """kill -9 of a rank at a random step: resumed, hex-equal, at most an interval redone."""
    step, victim = case.dice.randint(2, 12), case.dice.randrange(2)

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    run = train_small(case, "killed", fault)
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    case.expect(run.losses() == twin(case).losses(), "losses and gradient norms hex-equal to the undisturbed twin's")
    case.expect(run.faults() == ["rank killed"], f"one incident, rank killed, not {run.faults()}")
    spent = run.history.sessions[-1].steps[-1].run_ns
    case.expect(
        spent.get("downtime.restart", 0) > 0 and "startup.launch" not in spent, "the restart is downtime in the account"
    )
    for incident in run.incidents[:1]:
        case.expect((incident.rank, incident.step) == (victim, step), "the ledger names rank and step")
        case.expect(incident.steps_lost <= 4, f"at most the interval of 4 steps is lost, not {incident.steps_lost}")
        case.expect(incident.recover_s is not None, "the ledger knows how long it took")
        case.from_incident(incident)


def row_05(case: Case) -> None:
    """SIGSTOP: the stopped rank is named, killed at once, and the run goes on hex-equal."""
    step, victim = case.dice.randint(5, 12), case.dice.randrange(2)

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)

    run = train_small(case, "stopped", fault, hang_least_s=2.0)
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    case.expect(run.losses() == twin(case).losses(), "losses hex-equal to the twin's")
    case.expect(run.faults() == ["hang"], f"one incident, a hang, not {run.faults()}")
    for incident in run.incidents[:1]:
        case.expect(incident.rank == victim, f"rank {victim} is named, not {incident.rank}")
        case.expect("SIGSTOP" in incident.evidence and bool(incident.phase), "the evidence says stopped, and where")
        case.from_incident(incident)


def row_06(case: Case) -> None:
    """A slow rank is named with the phase it is slow in, within 20 steps, and by the run's diagnosis; nothing is
    restarted for it."""
    victim = case.dice.randrange(2)
    overrides = ("parallel.replicate=2", "parallel.fsdp=1", "train.steps=32", "checkpoint.every=null")

    def fault(at: Strike) -> None:
        if at.rank == victim and at.step == 3:
            # To the end, and long against what other programs take from a rank: the diagnosis is of the whole run.
            at.run.learner.replicas.module.register_forward_pre_hook(lambda *_: time.sleep(0.15))

    run = train_small(case, "slow", fault, *overrides, slow=0.15)
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    case.expect(len(run.history.sessions) == 1, "no restart")
    slow = [incident for incident in run.incidents if incident.fault == "slow rank"]
    case.expect(bool(slow) and all(incident.rank == victim for incident in slow), f"rank {victim}, not {slow}")
    for incident in slow[:1]:
        case.expect(incident.phase == "compute.forward", f"slow in compute.forward, not {incident.phase}")
        case.expect(incident.step <= 3 + 20, f"named within 20 steps, not in step {incident.step}")
    case.expect(run.losses() == twin(case, *overrides).losses(), "losses hex-equal to the twin's")
    told = [item for item in diagnose_run(read_run(run.folder.root)).findings if item.name.startswith("straggler")]
    case.expect(
        bool(told) and f"rank {victim} " in told[0].title and "compute.forward takes" in " ".join(told[0].evidence),
        f"`headway diagnose` names rank {victim} and its forward pass, not {told}",
    )
    case.measured(steps_lost=0)
    _a_slow_host_is_left_out(case, overrides)


def _a_slow_host_is_left_out(case: Case, overrides: tuple[str, ...]) -> None:
    """Slow once too often: the ranks save, and go on without it; no step is lost or made twice."""

    def fault(at: Strike) -> None:
        if at.rank == 1 and at.step == 3:
            run, real = at.run, at.run.collect_garbage

            def slow() -> None:
                with run.clock.phase("host.gc"):
                    time.sleep(0.15)
                real()

            run.collect_garbage = slow  # type: ignore[method-assign]

    hosts = HostList(case.folder / "slow.json", limit=1)
    watch: dict[str, Any] = {"slow": 0.15, "sharded": True, "places": ["one", "two"], "hosts": hosts, "min_ranks": 1}
    run = train_small(case, "evicted", fault, *overrides[2:], **watch)
    told = [fault for fault in run.faults() if fault != BUSY]  # that is another program's, and told apart
    case.expect(run.code == 0 and told == ["slow rank"], f"one incident, not {run.faults()}")
    worlds = [session.start.world_size for session in run.history.sessions]
    case.expect(worlds == [2, 1], f"two ranks, then one, not {worlds}")
    case.expect(HostList(hosts.path).excluded() == {"two"}, "the list says which and why")
    case.expect(not run.history.lost, "no step was made twice")
    case.expect(same_documents(run.history.kept, twin(case, *overrides).history.kept), "the same documents")


def row_28(case: Case) -> None:
    """A host dies again and again: it is taken out, the run goes on with fewer ranks and the same global batch.

    One that dies with its memory: the newest state comes from the other's memory, bit for bit.
    """
    step = case.dice.randint(5, 6)

    def fault(at: Strike) -> None:
        if at.rank == 1 and (at.generation, at.step) in ((0, step), (1, step + 3)):
            os.kill(os.getpid(), signal.SIGKILL)

    hosts = HostList(case.folder / "hosts.json", limit=2)
    run = train_small(case, "lost", fault, places=["one", "two"], hosts=hosts, min_ranks=1)
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    case.expect(run.faults() == ["rank killed"] * 2, f"two incidents, not {run.faults()}")
    case.expect([item.host for item in run.incidents] == ["two", "two"], "both are counted against the host")
    worlds = [session.start.world_size for session in run.history.sessions]
    case.expect(worlds == [2, 2, 1], f"2 ranks, 2 again, then 1, not {worlds}")
    case.expect(HostList(hosts.path).excluded() == {"two"}, "the list keeps it excluded")
    same = same_documents(run.history.kept, twin(case).history.kept)
    case.expect(same, "the same documents in every step, and the loss within rounding")
    for incident in run.incidents[-1:]:
        case.from_incident(incident)
    _a_host_is_lost_with_its_memory(case)
    _oom_is_told_apart(case)
    _the_kernel_kills_for_memory(case)


def _a_host_is_lost_with_its_memory(case: Case) -> None:
    """Agent, ranks and shared memory of one host go; a spare takes its place, the state comes from its neighbour."""
    victim = case.folder / "victim"

    def fault(at: Strike) -> None:
        at.run.saves.tiers.settle()  # else a save that finds the one before in work comes a step later
        if at.rank == 1 and at.step == 7 and at.once("memory"):
            victim.write_text(os.environ[NODE])
            memory = at.run.saves.tiers.memory
            while memory is not None and memory.root.exists():
                shutil.rmtree(memory.root, ignore_errors=True)  # a saver may be writing there: again, until all is gone
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

    run, codes = train_on_hosts(
        case, "memory", fault, ("one", "two", "three"), "checkpoint.memory_every=2", "checkpoint.every=null", most=2
    )
    lost = victim.read_text()
    case.expect(codes == {"one": 0, "two": 0, "three": 0} | {lost: -9}, f"the others end well, not {codes}")
    # The neighbour may just have been sending its own part there.
    told = [(item.fault, item.host) for item in run.incidents if not item.evidence.startswith("peer: ")]
    case.expect(told == [("host lost", lost)], f"one incident, the host's, not {told}")
    resumed = [session.start.resumed_from for session in run.history.sessions]
    case.expect(resumed == [0, 6], f"from step 6, which was in memory alone, not {resumed}")
    case.expect(run.losses() == twin(case).losses(), "losses hex-equal to the twin's")


def _the_kernel_kills_for_memory(case: Case) -> None:
    """For real, where this process may make a control group (v1): the rank that takes too much is killed, the ledger
    says for what, and the run goes on."""
    step, group = case.dice.randint(5, 7), _own_group(case)
    if group is None:
        return

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (1, step) and at.once("memory-hog"):
            used = int((group / "memory.usage_in_bytes").read_text())
            (group / "memory.limit_in_bytes").write_text(str(used + (256 << 20)))
            kept = []
            while True:
                kept.append(bytearray(os.urandom(1 << 20)) * 16)

    before = (group / "memory.limit_in_bytes").read_text()
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        run = train_small(case, "hog", fault)
        (group / "memory.limit_in_bytes").write_text(before)
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # a saver may still be ending in it
            group.rmdir()
    told = [(item.fault, item.rank) for item in run.incidents]
    case.expect(told == [("killed for memory", 1)], f"one incident, memory, of rank 1: {told}")
    case.expect(run.code == 0 and run.losses() == twin(case).losses(), "losses hex-equal to the twin's")


def _own_group(case: Case) -> Path | None:
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").is_file() else []
    own = next((line.rpartition(":")[2] for line in lines if ":memory:" in line), None)
    if own is None:
        return None
    group = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"headway-{case.row}-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    return group if (group / "memory.limit_in_bytes").is_file() else None


def _oom_is_told_apart(case: Case) -> None:
    group = case.folder / "cgroup"
    group.mkdir()
    (group / "memory.events").write_text("oom_kill 4\n")
    counter = OomCounter(group, case.folder / "none")
    case.expect(counter.new_kills() == 0, "an OOM kill before the start is not this one's")
    (group / "memory.events").write_text("oom_kill 5\n")
    case.expect(counter.new_kills() == 1, "137 with an oom_kill event is told from a plain kill")


def row_18(case: Case) -> None:
    """The wall clock jumps an hour on one rank: no alarm, nothing lost, the ledger's times keep both clocks."""
    jump = case.dice.choice([-3600.0, 3600.0])

    def fault(at: Strike) -> None:
        if at.step == 5:
            real = time.time
            time.time = lambda: real() + jump

    run = train_small(case, "clock", fault, hang_least_s=2.0)
    case.expect(run.code == 0 and run.incidents == [], f"no incident, not {run.faults()}")
    case.expect(run.losses() == twin(case).losses(), "losses hex-equal to the twin's")
    moments = [line.time for line in run.history.kept]
    case.expect(abs(moments[-1] - moments[0] - jump) < 600, "the clock did jump")
    case.expect(all(line.wall_ns < 600e9 for line in run.history.kept), "no step's duration has the jump in it")
    case.measured(steps_lost=0)


def row_34(case: Case) -> None:
    """A step that always dies: two deaths, then the run stops and names step and batch."""
    step = case.dice.randint(3, 8)

    def fault(at: Strike) -> None:
        if at.rank == 1 and at.step == step:
            raise RuntimeError(f"planted at {id(at)}")

    run = train_small(case, "doomed", fault)
    case.expect(run.code == 1, f"exit code 1, not {run.code}")
    actions = [incident.action for incident in run.incidents]
    case.expect(len(actions) == 2, f"two deaths, not {len(actions)}")
    case.expect(actions[-1:] == ["stopped the run"], "the second death stops the run")
    case.expect(all(incident.step == step for incident in run.incidents), "the ledger names the step")
    log = (case.folder / "log.txt").read_text()
    case.expect(f"2 times at step {step}, in the batch from document" in log, "stderr names step and batch")
