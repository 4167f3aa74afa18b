"""The leading agent's decisions, without clocks, sockets or processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.cli.launch import _meeting
from headway.guard.beacon import Pulse
from headway.guard.deaths import FAILED, KILLED, Death
from headway.guard.hang import Hang
from headway.guard.nodes.cause import of_reports
from headway.guard.nodes.leader import Leader, Limits
from headway.guard.nodes.meeting import agentless
from headway.guard.nodes.messages import Order, Seat, Status
from headway.guard.nodes.roll import Roll, compact
from headway.guard.report import Report


class Court:
    def __init__(self, out: set[str] | None = None, fits: Sequence[int] = range(99)) -> None:
        self.out, self.fits, self.deaths, self.slow = out or set(), fits, [], False

    def excluded(self) -> set[str]:
        return self.out

    def enough(self, ranks: int) -> bool:
        return ranks in self.fits

    def begin(self, team: Sequence[str]) -> None: ...

    def look(self, pulses: Mapping[int, Pulse], living: set[int]) -> Hang | None:
        return None

    def evict(self) -> bool:
        return self.slow

    def settle(self, pulses: Mapping[int, Pulse]) -> None:
        self.settled = dict(pulses)

    def decide(self, death: Death, link: str, at: int, pulses: Mapping[int, Pulse]) -> tuple[str | None, int]:
        self.deaths.append(death)
        return None, 0

    def leave(self, final: Report, reports: Iterable[Report]) -> None:
        self.left = final


def status(member: int, beat: int = 1, **more: object) -> Status:
    known = {"host": f"n{member}", "ranks": 2, "address": "", "standby": 0, **more}
    return Status(member=member, beat=beat, **known)


def leader(court: Court, least: int, most: int, **more: object) -> Leader:
    return Leader(Limits(least, most, wait_s=10, patience_s=60), court, 1, "n1", Roll(2.0), **more)


def seats(*hosts: str) -> tuple[Seat, ...]:
    return tuple(
        Seat(member=i + 1, host=host, ranks=2, first=2 * i, address="", standby=0) for i, host in enumerate(hosts)
    )


def pulse(**more: object) -> Pulse:
    known = dict.fromkeys(Pulse.__dataclass_fields__, 0) | {"phase": "step", "durations": (), "begun": True, "steps": 5}
    return Pulse(**(known | more))


def dead(generation: int, fault: str, rank: int, at: float) -> Report:
    death = Death(fault, rank, 5, "step", f"rank {rank}", fault, True, 0)
    return Report(generation=generation, code=None, death=death, failed_at=at)


def test_the_first_start_waits_for_more_than_the_fewest_and_then_goes_without() -> None:
    one = leader(Court(), 1, 3)
    one.roll.note(0, status(1))
    one.roll.note(0, status(2))
    assert one.tick(0.5).phase == "gather"
    for at in (2, 4, 6, 8, 10, 12):
        for member in (1, 2):
            one.roll.note(at, status(member, beat=at))
        order = one.tick(at)
    assert (order.phase, [seat.host for seat in order.team]) == ("run", ["n1", "n2"])
    assert [seat.first for seat in order.team] == [0, 2]


def test_spares_excluded_hosts_and_numbers_that_do_not_fit_stay_out() -> None:
    one = leader(Court({"n2"}, fits=(2, 4, 8)), 1, 4)
    for member in (1, 2, 3, 4):
        one.roll.note(0, status(member))
    chosen = [heard.status.host for heard in one.choose()]
    assert chosen == ["n1", "n3"]  # three of them would be six ranks


def test_two_agents_of_one_name_are_one_that_stays_and_one_that_is_told_why() -> None:
    one = leader(Court(), 2, 2)
    for at in (0.0, 1.0, 2.0, 2.4):
        one.roll.note(at, status(1, round(at * 10), host="vm", agent="pid 7, a"))
        one.roll.note(at, status(2, round(at * 10), host="vm", agent="pid 8, b"))
        order = one.tick(at)
        assert (order.phase, order.refused) == ("gather", {})  # the first may have died just now
    for member, agent in ((1, "pid 7, a"), (2, "pid 8, b")):
        one.roll.note(2.6, status(member, 26, host="vm", agent=agent))
    assert list(one.tick(2.6).refused) == [2] and "(pid 7, a) is called vm already" in one.order.refused[2]
    assert "--node vm-1" in one.order.refused[2]
    # With names of their own the two train.
    one.roll.note(2.7, status(2, 27, host="vm", agent="pid 8, b", leaving=True))
    one.roll.note(2.7, status(3, 1, host="vm-2", agent="pid 9, c"))
    one.roll.note(2.7, status(1, 27, host="vm", agent="pid 7, a"))
    order = one.tick(2.7)
    assert (order.phase, order.refused, [seat.host for seat in order.team]) == ("run", {}, ["vm", "vm-2"])


def test_an_agent_started_in_the_place_of_a_dead_one_is_no_double() -> None:
    one = leader(Court(), 2, 2)
    one.roll.note(0.0, status(2, 1, host="b", agent="dead"))
    for beat, at in enumerate((0.1, 1.0, 1.9, 2.5, 3.0), 1):
        one.roll.note(at, status(1, beat, agent="first"))
        one.roll.note(at, status(3, beat, host="b", agent="new"))
        if beat == 1:
            assert one.roll.by_host()["b"].status.agent == "dead"
        assert one.tick(at).refused == {}
    assert one.roll.by_host()["b"].status.agent == "new"
    # The same agent under another number, because it was cut off: the newest speaks.
    one.roll.note(3.1, status(4, 1, host="b", agent="new"))
    assert one.roll.by_host()["b"].status.member == 4 and one.roll.doubles(9.0) == {}


def test_a_kill_explains_what_failed_before_it() -> None:
    """The survivor's collective fails, and is told first; its clock runs ahead besides."""
    reports = [dead(0, FAILED, 0, at=1.0), dead(0, KILLED, 3, at=5.0)]
    assert of_reports(reports, None)[0].rank == 3
    assert of_reports([dead(0, FAILED, 0, 2.0), dead(0, FAILED, 3, 1.0)], None)[0].rank == 3
    hang = Hang(1, 5, "data", 6.0, 5.0, "no progress")
    assert of_reports(reports, hang)[0].fault == "hang"


def test_a_host_that_fell_silent_is_the_cause_whatever_the_others_say() -> None:
    court = Court()
    one = leader(court, 1, 2)
    for member in (1, 2):
        one.roll.note(0, status(member))
    assert one.tick(0).phase == "run"
    one.roll.note(0.5, status(1, 2, generation=0, report=dead(0, FAILED, 0, 1.0), pulses={0: pulse(step=7)}))
    assert one.tick(0.5).phase == "end"
    one.roll.note(0.9, status(1, 3, generation=0, report=dead(0, FAILED, 0, 1.0), pulses={0: pulse(step=7)}))
    assert one.tick(0.9).phase == "end"  # it may yet tell
    one.roll.note(1.1, status(1, 4, generation=0, report=dead(0, FAILED, 0, 1.0), pulses={0: pulse(step=7)}))
    assert one.tick(1.1).gone == (2,)  # half the time: another machine's ranks have failed
    (death,) = court.deaths
    assert (death.fault, death.host, death.step) == ("host lost", "n2", 8)
    one.roll.note(1.2, status(2, 9))  # frozen, and awake again: under its old number it is not heard
    assert 2 not in one.roll.here()


def test_a_users_mistake_on_one_machine_ends_the_run() -> None:
    one = leader(Court(), 1, 2)
    for member in (1, 2):
        one.roll.note(0, status(member))
    one.tick(0)
    one.roll.note(0.1, status(2, 2, report=Report(generation=0, code=2)))
    assert one.tick(0.1).phase == "end"
    one.roll.note(0.2, status(1, 2, report=Report(generation=0, code=None)))
    order = one.tick(0.2)
    assert (order.phase, order.code, one.court.left.code) == ("over", 2, 2)


def test_what_a_death_has_cost_is_known_though_all_is_over_before_anybody_looked() -> None:
    court = Court()
    one = leader(court, 1, 1)
    one.roll.note(0, status(1))
    assert one.tick(0).phase == "run"
    ended = status(1, 2, generation=0, report=Report(generation=0, code=0), pulses={0: pulse(first_ns=5)})
    one.roll.note(0.1, ended)
    assert one.tick(0.1).phase == "over" and 0 in court.settled


@given(st.integers(1, 7), st.data())
def test_two_sides_of_a_cut_never_both_go_on(size: int, data: st.DataObject) -> None:
    hosts = [f"n{index}" for index in range(size)]
    here = set(data.draw(st.lists(st.sampled_from(hosts), unique=True)))
    last = Order(generation=3, team=seats(*hosts), leader="n0")
    going = []
    for side in (here, set(hosts) - here):
        if not side:
            continue
        host = "n0" if "n0" in side else min(side)  # the old leader still leads its side
        one = Leader(Limits(1, 9), Court(), 1, host, Roll(2.0), last)
        for member, name in enumerate(sorted(side, key=lambda name: (name != host, name)), 1):
            one.roll.note(0, status(member, host=name))
        one.tick(0)
        going.append(one.tick(0).phase == "run")
    assert sum(going) == 1


def test_without_the_leader_half_is_not_enough_and_the_death_is_written_down() -> None:
    for alive, goes_on in ((["n1"], False), (["n1", "n2"], True)):
        court = Court()
        last = Order(generation=3, team=seats("n0", "n1", "n2")[: len(alive) + 1], leader="n0")
        one = Leader(Limits(1, 3), court, 1, "n1", Roll(2.0), last)
        for member, name in enumerate(alive, 1):
            one.roll.note(0, status(member, host=name))
        one.tick(0)
        order = one.tick(0)
        assert (order.phase == "run") == goes_on and [death.host for death in court.deaths] == ["n0"] * goes_on
        assert not goes_on or order.generation == 4


def test_a_run_that_waits_in_vain_ends() -> None:
    one = leader(Court(), 2, 2)
    for at in range(1, 64):
        one.roll.note(at, status(1, beat=at))
        order = one.tick(at)
    assert (order.phase, order.code) == ("over", 1) and "1 machine here, 2 needed" in order.why


def test_a_beacon_is_read_in_the_listeners_clock_and_stands_still_when_it_does() -> None:
    roll = Roll(2.0)
    for beat, (at, sent) in enumerate([(100.0, 7.0), (100.3, 7.25), (101.0, 8.0)], 1):
        roll.note(at, status(1, beat, now_ns=round(sent * 1e9), pulses={0: pulse(beat_ns=round(6.5e9))}))
        assert roll.here()[1].pulses()[0].beat_ns == round(99.5e9)


@given(st.lists(st.integers(1, 10**9), max_size=128))
def test_a_compact_pulse_has_the_same_limits(durations: list[int]) -> None:
    whole = pulse(durations=tuple(durations))
    assert (compact(whole).median_ns(), compact(whole).p99_ns()) == (whole.median_ns(), whole.p99_ns())


def test_an_agents_rank_among_agents_is_no_rank() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "1", "WORLD_SIZE": "2", "HOME": "/"}
    assert agentless(slurm) == {"SLURM_STEP_NUM_TASKS": "2", "HOME": "/"}
    assert "RANK" in agentless({**slurm, "LOCAL_RANK": "0"})  # a rank of torchrun starts no agents


@pytest.mark.parametrize(
    ("nnodes", "rdzv", "lost_s", "why"),
    [
        ("2", None, 2.0, "belong together"),
        ("3:2", "a:1", 2.0, "MIN:MAX"),
        ("2", "a", 2.0, "HOST:PORT"),
        ("2", "a:1", 0.1, "four times a second"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(nnodes: str, rdzv: str | None, lost_s: float, why: str) -> None:
    with pytest.raises(UserError, match=why):
        _meeting(None, nnodes, rdzv, None, 30.0, lost_s)  # type: ignore[arg-type]


def test_a_machine_that_is_silent_while_no_rank_failed_has_all_its_time() -> None:
    one = leader(Court(), 1, 2)
    for member in (1, 2):
        one.roll.note(0, status(member))
    one.tick(0)
    one.roll.note(1.5, status(1, 2, generation=0, pulses={0: pulse(step=7)}))
    assert (one.tick(1.5).phase, one.roll.gone) == ("run", set())


def _asked_to_leave_the_second_out(court: Court) -> Leader:
    """Two machines train, the second is slow again and again: all are asked to save and to leave."""
    one = leader(court, 1, 2)
    for member in (1, 2):
        one.roll.note(0, status(member))
    one.tick(0)
    court.slow, court.out = True, {"n2"}
    one.roll.note(0.2, status(1, 2, generation=0, pulses={0: pulse(step=7)}))
    assert one.tick(0.2).pause
    return one


def test_a_machine_that_is_slow_again_and_again_is_left_out_with_the_state_saved() -> None:
    court = Court()
    one = _asked_to_leave_the_second_out(court)
    for member in (1, 2):
        one.roll.note(0.4, status(member, 3, generation=0, report=Report(generation=0, code=75)))
    assert one.tick(0.4).phase == "gather"
    court.slow = False
    assert [seat.host for seat in one.tick(0.5).team] == ["n1"]


@pytest.mark.parametrize(("code", "phase"), [(1, "gather"), (2, "over"), (130, "over")])
def test_a_machine_is_left_out_though_the_state_could_not_be_saved(code: int, phase: str) -> None:
    court = Court()
    one = _asked_to_leave_the_second_out(court)
    # The second one has not heard of the pause: its ranks went with the first one's.
    full = Death(FAILED, 0, 8, "step", "step 7 could not be saved", "full", True, 0)
    for member in (1, 2):
        report = Report(generation=0, code=code, death=full if code != 130 else None, why="why")
        one.roll.note(0.4, status(member, 3, generation=0, report=report))
    assert one.tick(0.4).phase == "end" and one.tick(0.5).phase == phase
    if phase == "gather":
        court.slow = False
        assert court.deaths == [full] and not one.order.pause
        assert [seat.host for seat in one.tick(0.6).team] == ["n1"]


def test_a_failed_save_that_nobody_but_the_user_asked_for_ends_the_run() -> None:
    one = leader(Court(), 1, 2)
    for member in (1, 2):
        one.roll.note(0, status(member))
    one.tick(0)
    full = Death(FAILED, 0, 8, "step", "step 7 could not be saved", "full", True, 0)
    for member in (1, 2):
        one.roll.note(0.4, status(member, 2, generation=0, report=Report(generation=0, code=1, death=full)))
    one.tick(0.4)
    assert (one.tick(0.5).phase, one.order.code) == ("over", 1)


def test_words_of_a_machine_that_does_not_take_part_are_about_nobody() -> None:
    one = leader(Court(), 1, 2)
    for member in (1, 2, 3):
        one.roll.note(0, status(member))
    one.tick(0)
    for member, generation in ((1, 0), (2, -1), (3, 0)):
        words = {rank: f"n{member}" for rank in (2 * member - 2, 2 * member - 1)}
        one.roll.note(
            0.2, status(member, 2, generation=generation, vitals={**words, 9: "old"} if member == 3 else words)
        )
    assert one.vitals() == {0: "n1", 1: "n1"}  # the second's are of the generation before, the third is a spare
