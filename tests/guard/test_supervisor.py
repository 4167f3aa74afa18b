"""The supervisor: a dead, stopped or failing rank costs some steps, never the run; what cannot be helped ends it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from supervised import Place, supervise, twin

from headway.account.errors import UserError
from headway.guard.deaths import Death, Judgement
from headway.guard.watching import Watch
from headway.train.unended import is_an_end
from headway.watch.incidents import is_failure

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def nothing(place: Place) -> None:
    pass


def until_asked_to_stop() -> None:
    """Returns when the supervisor's signal has reached this rank."""
    stop, until = signal.getsignal(signal.SIGTERM).__self__, time.monotonic() + 30  # type: ignore[union-attr]
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.01)


def test_an_undisturbed_run_has_no_incident(tmp_path: Path) -> None:
    ended = supervise(tmp_path, nothing)
    assert (ended.code, ended.incidents, ended.state) == (0, [], twin())


def test_a_killed_rank_costs_only_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 1 and place.step == 7 and place.once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    ended = supervise(tmp_path, fault, ranks=3)
    assert ended.code == 0 and ended.state == twin(ranks=3)
    (incident,) = ended.incidents
    assert (incident.fault, incident.rank, incident.step, incident.steps_lost) == ("rank killed", 1, 7, 2)
    assert incident.recover_s is not None and incident.seconds_lost > 0 and "restarted" in incident.action


def test_a_stopped_rank_is_named_and_killed_at_once(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 1 and place.step == 6 and place.once("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)

    ended = supervise(tmp_path, fault, hang_least_s=1.0)
    (incident,) = ended.incidents
    assert ended.code == 0 and ended.state == twin()
    assert (incident.fault, incident.rank, incident.step) == ("hang", 1, 6)
    assert incident.phase == "compute.forward" and "SIGSTOP" in incident.evidence


def test_a_hung_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    def sleeping_for_ever() -> None:
        time.sleep(600)

    def fault(place: Place) -> None:
        if place.rank == 0 and place.step == 6 and place.once("hung"):
            sleeping_for_ever()

    ended = supervise(tmp_path, fault, hang_least_s=1.5)
    (incident,) = ended.incidents
    assert ended.code == 0 and ended.state == twin()
    assert (incident.fault, incident.rank) == ("hang", 0) and "sleeping_for_ever" in incident.evidence
    assert (tmp_path / incident.link).read_text()


def test_no_alarm_where_it_takes_long_by_nature(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 0 and place.generation == 0 and place.step in (1, 8):
            # Compiling in the first step and, for a new shape, in the middle of the run: longer than any limit.
            with_phase = place.step == 8
            if with_phase:
                place.beacon.enter("compile")
            time.sleep(1.5)
            if with_phase:
                place.beacon.leave()

    ended = supervise(tmp_path, fault, hang_least_s=0.8)
    assert (ended.code, ended.incidents) == (0, [])


def test_the_same_death_twice_at_one_step_stops_the_run(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 1 and place.step == 7:
            raise ValueError(f"planted at {id(place)}")  # another text each time, the same death

    ended = supervise(tmp_path, fault)
    assert ended.code == 1 and len(ended.incidents) == 2
    assert ended.incidents[1].action == "stopped the run" and ended.incidents[0].action.startswith("restarted")
    assert "2 times at step 7, in the batch from document 60" in ended.err and "ValueError" in ended.err


def test_deaths_at_different_steps_go_on_as_long_as_the_run_gets_further(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 1 and place.step in (2, 4, 5, 7, 8, 9, 11, 12) and place.once(f"killed-{place.step}"):
            os.kill(os.getpid(), signal.SIGKILL)

    ended = supervise(tmp_path, fault, every=1)
    assert ended.code == 0 and ended.state == twin() and len(ended.incidents) == 8


def test_a_run_that_never_starts_is_not_started_for_ever(tmp_path: Path) -> None:
    ended = supervise(tmp_path, nothing, dies_at_start=True)
    assert ended.code == 128 + 9 and len(ended.incidents) == 4 and "without a new step" in ended.err


def test_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        raise UserError("data: no such file")

    ended = supervise(tmp_path, fault)
    assert (ended.code, ended.incidents) == (2, [])


def test_sigterm_saves_and_is_no_failure(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 0 and place.step == 6 and place.once("told"):
            os.kill(os.getppid(), signal.SIGTERM)
            until_asked_to_stop()

    ended = supervise(tmp_path, fault)
    assert (ended.code, ended.incidents) == (75, []) and len(ended.state) in (6, 7)
    again = supervise(tmp_path, nothing)
    assert again.code == 0 and again.state == twin()


def test_sigterm_that_kills_a_rank_at_work_is_not_called_saved(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.step == 6:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(30)

    ended = supervise(tmp_path, fault)
    assert ended.code == 128 + signal.SIGTERM and "before it could save" in ended.err and len(ended.state) == 4


def test_a_place_that_is_left_out_while_the_disk_is_full_costs_steps_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor wants the ranks to leave, and they cannot save; the user wanted nothing."""
    monkeypatch.setattr(Watch, "evict", property(lambda watch: (tmp_path / "slow").exists()))

    def fault(place: Place) -> None:
        if place.rank == 0 and place.step == 6 and place.once("evicted"):
            (tmp_path / "full").touch()
            (tmp_path / "slow").touch()
            until_asked_to_stop()

    ended = supervise(tmp_path, fault, hang_least_s=60.0)
    (incident,) = ended.incidents
    assert ended.code == 0 and ended.state == twin(), ended.err
    assert incident.fault == "rank failed" and "could not be saved: no room" in incident.evidence
    assert incident.action.startswith("restarted")


def test_a_save_that_fails_when_the_user_stops_the_run_ends_it(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 0 and place.step == 6 and place.once("told"):
            (tmp_path / "full").touch()
            os.kill(os.getppid(), signal.SIGTERM)
            until_asked_to_stop()

    ended = supervise(tmp_path, fault)
    assert (ended.code, ended.incidents) == (1, [])


def test_a_mistake_that_cuts_rank_0_off_is_known_to_be_no_death(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.step == 7:
            if place.rank == 1:
                raise UserError("data: no such file")
            time.sleep(60)

    ended = supervise(tmp_path, fault, grace_s=0.1)
    (incident,) = ended.incidents
    assert (ended.code, incident.fault, incident.step) == (2, "stopped", 6)
    assert "data: no such file" in incident.evidence and is_an_end(incident) and not is_failure(incident)


def test_a_second_ctrl_c_is_known_to_be_no_death(tmp_path: Path) -> None:
    def fault(place: Place) -> None:
        if place.rank == 0 and place.step == 6:
            os.kill(os.getppid(), signal.SIGINT)
            until_asked_to_stop()
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)

    ended = supervise(tmp_path, fault)
    (incident,) = ended.incidents
    assert (ended.code, incident.fault) == (130, "stopped") and "second Ctrl-C" in incident.evidence
    assert is_an_end(incident) and not is_failure(incident)


def death(step: int, signature: str = "signal 9", begun: bool = True) -> Death:
    return Death("rank killed", 1, step, "compute.forward", "killed", signature, begun, 5)


def test_only_the_same_death_in_a_row_is_hopeless() -> None:
    judgement = Judgement()
    assert judgement.hopeless(death(7), 6) is None
    assert judgement.hopeless(death(7, "signal 11"), 8) is None
    assert judgement.hopeless(death(7), 9) is None
    assert judgement.hopeless(death(9), 10) is None
    assert "2 times at step 9" in (judgement.hopeless(death(9), 11) or "")
