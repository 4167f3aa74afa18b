"""The loop, short enough to read aloud. Its contract is printed in docs/loop.md; policy lives in the rooms."""

from __future__ import annotations

from headway.train.run import Run

DONE, PREEMPTED, FAILED, INTERRUPTED = "done", "preempted", "failed", "interrupted"


def train(run: Run) -> str:
    """Trains until the run has no more steps or is asked to stop; returns ``done`` or ``preempted``.

    Every second falls into the run's account: the clock's step runs from one `begin_step` to the next, and what
    happens between steps (evaluation, saving) has a category of its own.
    """
    reason = FAILED
    try:
        run.start()
        while run.has_steps_left():
            run.begin_step()
            run.tell_finished_steps()
            batch = run.next_batch()
            run.learn(batch)
            run.collect_garbage()
            stop = run.agree_to_stop()
            run.check_replicas()
            if run.evaluation_is_due():
                run.evaluate()
            if stop or run.save_is_due():
                run.save(must=stop)
            if stop:
                return (reason := PREEMPTED)
        run.finish()
        return (reason := DONE)
    except KeyboardInterrupt:
        reason = INTERRUPTED
        raise
    finally:
        run.close(reason)
