"""What the deaths of a generation followed from. A rank whose neighbour died fails in its next collective, too, and
often before anybody tells it to stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headway.guard.beacon import OUTSIDE, Pulse
from headway.guard.deaths import ELSEWHERE, FAILED, HANG, Death
from headway.guard.hang import Hang
from headway.guard.nodes.messages import Seat
from headway.guard.report import Report


def of_a_lost_host(seat: Seat, silent_s: float, pulses: Mapping[int, Pulse]) -> Death:
    """The death of a machine that is not heard of any more. `pulses`: the last ones of all ranks."""
    own = [pulses[rank] for rank in range(seat.first, seat.first + seat.ranks) if rank in pulses]
    return Death(
        fault=ELSEWHERE,
        rank=None,
        step=max((pulse.step for pulse in pulses.values()), default=0) + 1,
        phase=own[0].phase if own else OUTSIDE,
        evidence=f"no sign of life from {seat.host} for {silent_s:.1f} s",
        signature=f"{seat.host} lost",
        begun=any(pulse.begun for pulse in pulses.values()),
        documents=own[0].documents if own else 0,
        detect_s=silent_s,
        host=seat.host,
    )


def of_reports(reports: Iterable[Report], hang: Hang | None) -> tuple[Death, str]:
    """The death, and the file that says more: the condemned rank's, else a kill, else that of who failed first."""
    told = [(report.death, report) for report in reports if report.death is not None]
    if hang is not None:
        found = [(death, report.link) for death, report in told if death.rank == hang.rank]
        unseen = Death(HANG, hang.rank, hang.step, hang.phase, hang.evidence, f"hang in {hang.phase}", True, 0)
        return found[0] if found else (unseen, "")
    # Clocks of machines differ by milliseconds; a kill needs no clock.
    death, report = min(told, key=lambda item: (item[0].fault == FAILED, item[1].failed_at))
    return death, report.link
