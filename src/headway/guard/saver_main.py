"""The saver process: reads jobs, a JSON line each, and tells outcomes.

`python -m headway.guard.saver_main RUN_FOLDER TRAINER`: the process that trains is named, because the parent found here
would be another's where the trainer has died meanwhile. The saver outlives it until the job in work is done: what was
staged is committed, under its own generation only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import msgspec

from headway.guard import crash
from headway.guard.save_job import Job, Outcome, Room, make_room, run_job

_NICE = 10  # training comes first


def main() -> None:
    # A stop asks for a last checkpoint: this process must live to write it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    crash.trainer = int(sys.argv[2])
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job | Room)
        if job.attempt:
            os.environ.pop(crash.VARIABLE, None)  # an injected death comes once
        if isinstance(job, Room):
            make_room(job, _tell)
        else:
            run_job(job, _tell)


def _tell(outcome: Outcome) -> None:
    with contextlib.suppress(BrokenPipeError):  # the trainer is gone; the job is still worth finishing
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
