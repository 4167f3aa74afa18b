"""Several agents: a rank, a host, or the leading host may go; the run goes on where most of the machines are."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from supervised import Hosts, Place, twin

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def on(host: str) -> bool:
    return os.environ["HEADWAY_NODE"] == host


def lose_host() -> None:
    """The agent is killed, and all its processes with it."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def nothing(place: Place) -> None:
    pass


def test_a_rank_killed_on_another_host_is_found_and_all_start_again(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if on("b") and place.step == 7 and place.once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    hosts = Hosts(tmp_path, fault, 2, 2)
    hosts.start("a")
    hosts.opened()
    hosts.start("b")
    assert hosts.wait() == {"a": 0, "b": 0}, hosts.said()
    assert hosts.state == twin()
    (incident,) = hosts.incidents
    assert (incident.fault, incident.host, incident.rank, incident.step) == ("rank killed", "b", 1, 7)
    assert incident.recover_s is not None


def test_a_lost_host_is_left_out(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if on("c") and place.step == 7 and place.once("killed"):
            lose_host()

    hosts = Hosts(tmp_path, fault, 1, 3, lost_s=1.0)
    hosts.start("a")
    hosts.opened()
    hosts.start("b", "c")
    codes = hosts.wait()
    assert codes == {"a": 0, "b": 0, "c": -9}, hosts.said()
    (incident,) = hosts.incidents
    assert (incident.fault, incident.host) == ("host lost", "c")
    assert hosts.state == [*twin(ranks=3)[:4], *twin(ranks=2)[4:]]


def test_the_leading_host_may_go_too(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if on("a") and place.step == 7 and place.once("killed"):
            lose_host()

    hosts = Hosts(tmp_path, fault, 1, 3, lost_s=1.0)
    hosts.start("a")
    hosts.opened()
    hosts.start("b", "c")
    codes = hosts.wait()
    assert codes == {"a": -9, "b": 0, "c": 0}, hosts.said()
    (incident,) = hosts.incidents
    assert (incident.fault, incident.host) == ("host lost", "a")
    assert hosts.state == [*twin(ranks=3)[:4], *twin(ranks=2)[4:]]


def test_a_host_that_was_frozen_stops_its_ranks_and_comes_back(tmp_path: Path) -> None:
    """Cut off: the others go on without it; it trains no further, and is taken in again without a step lost."""

    def fault(place: Place) -> None:
        if on("a") and place.step == 7:
            place.once("reached")
        if place.generation == 1 and place.step > 30:
            time.sleep(0.1)  # until it is back: at most ten seconds

    hosts = Hosts(tmp_path, fault, 1, 3, lost_s=1.0, steps=130)
    hosts.start("a")
    hosts.opened()
    hosts.start("b", "c")
    hosts.until(lambda: (tmp_path / "reached").exists())
    frozen = hosts.pids("c")
    hosts.send("c", signal.SIGSTOP)
    hosts.until(lambda: len(hosts.incidents) > 0)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    assert hosts.wait() == {"a": 0, "b": 0, "c": 0}, hosts.said()
    (incident,) = hosts.incidents
    assert (incident.fault, incident.host) == ("host lost", "c")
    alone, together = twin(130, ranks=2), twin(130, ranks=3)
    back = next(step for step in range(30, 130) if hosts.state[step] == together[step])
    first = next(step for step in range(130) if hosts.state[step] == alone[step])
    assert hosts.state == [*together[:first], *alone[first:back], *together[back:]]
    assert (
        "generation 2 on a, b, c" in hosts.said()
        and not json.loads((tmp_path / "hosts.json").read_text())["c"]["excluded"]
    )


def test_a_spare_takes_the_place(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.step == 5 and on("b"):
            hosts.until(lambda: (tmp_path / "spare").exists())
        if on("b") and place.step == 7 and place.once("killed"):
            lose_host()

    hosts = Hosts(tmp_path, fault, 2, 2, lost_s=1.0)
    hosts.start("a")
    hosts.opened()
    hosts.start("b")
    hosts.until(lambda: "generation 0" in hosts.said())
    hosts.start("c")
    hosts.until(lambda: (tmp_path / "c.txt").exists())
    time.sleep(0.5)
    (tmp_path / "spare").touch()
    codes = hosts.wait()
    assert codes == {"a": 0, "b": -9, "c": 0}, hosts.said()
    assert hosts.state == twin()


def test_the_smaller_side_does_not_go_on(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if on("a") and place.step == 7 and place.once("killed"):
            lose_host()

    hosts = Hosts(tmp_path, fault, 1, 2, lost_s=1.0, patience_s=3.0)
    hosts.start("a")
    hosts.opened()
    hosts.start("b")
    codes = hosts.wait()
    assert codes == {"a": -9, "b": 1}, hosts.said()
    assert hosts.state == twin()[:4]


def test_a_stopped_rank_is_named_across_hosts(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if on("b") and place.step == 6 and place.once("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)

    hosts = Hosts(tmp_path, fault, 2, 2, hang_least_s=1.0)
    hosts.start("a")
    hosts.opened()
    hosts.start("b")
    assert hosts.wait() == {"a": 0, "b": 0}, hosts.said()
    (incident,) = hosts.incidents
    assert (incident.fault, incident.host, incident.rank) == ("hang", "b", 1) and "SIGSTOP" in incident.evidence


def test_two_agents_of_one_name_are_told_apart_and_sigterm_ends_one_that_waits(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, nothing, 2, 2, lost_s=0.5)
    hosts.start("vm")
    hosts.opened()
    first = hosts.agents.pop("vm")
    hosts.start("vm")
    second = hosts.agents.pop("vm")
    second.join(20.0)
    assert second.exitcode not in (None, 0) and f"(pid {first.pid}, " in hosts.said()
    assert "is called vm already; give each" in hosts.said() and "--node vm-2" in hosts.said()
    assert first.is_alive()  # it still waits for one with a name of its own
    os.kill(first.pid or 0, signal.SIGTERM)
    first.join(10.0)
    assert first.exitcode == 75


def test_sigterm_ends_an_agent_that_nobody_answers(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, nothing, 2, 2, lost_s=0.5)
    with socket.create_server(("127.0.0.1", hosts.port)):  # the port is open, and no store is behind it
        hosts.start("a")
        hosts.until(lambda: "waiting for the first agent" in hosts.said())
        hosts.send("a", signal.SIGTERM)
        hosts.agents["a"].join(10.0)
    assert hosts.agents["a"].exitcode == 75


def test_sigterm_to_one_agent_saves_everywhere(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if on("b") and place.step == 6 and place.once("told"):
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.3)

    hosts = Hosts(tmp_path, fault, 2, 2)
    hosts.start("a")
    hosts.opened()
    hosts.start("b")
    assert hosts.wait() == {"a": 75, "b": 75}, hosts.said()
    assert hosts.incidents == [] and len(hosts.state) in (6, 7)
