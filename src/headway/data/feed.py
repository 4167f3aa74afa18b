"""Batches ready before they are asked for: one thread that runs ahead of training, or a process that it asks."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headway.data.batch import BadDocuments, Batch, BatchBuilder
from headway.data.build_process import BuildProcess
from headway.data.global_batch import GlobalBatch, Position
from headway.data.stream import Stream


@dataclass(frozen=True, eq=False)
class Fed:
    """A global batch, and this rank's micro-batches of it on the device."""

    batch: GlobalBatch
    micro_batches: list[Batch]
    copied: torch.cuda.Event | None = None
    bad: tuple[tuple[int, str], ...] = ()
    """Documents that this rank could not read, (raw id, why): its micro-batches are padding in their place."""

    def wait_on_device(self) -> None:
        """On CUDA: the current stream waits for the copies, which ran on a stream of their own; the host does not."""
        if self.copied is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self.copied)
        for batch in self.micro_batches:
            batch.record_stream(stream)


def stand_in(
    stream: Stream, position: Position, bad: BadDocuments, rank: int, world: int, device: torch.device | str
) -> Fed:
    """What a rank whose documents are bad takes part in the step with, until all ranks know of them."""
    batch = stream.global_batch(position)
    builder = BatchBuilder(stream.view)
    count = -(-len(batch.micro) // world)
    return Fed(batch, [batch.micro[-1].padding(builder).to(device) for _ in range(count)], bad=tuple(bad.documents))


class Feeder:
    """Iterates over a stream from ``position`` without end, up to ``depth`` global batches ahead of the consumer.

    A context manager; `close` ends the thread. What goes wrong in the thread is raised at the consumer, after the
    batches that were ready before it. On CUDA, batches are copied from pinned memory without blocking, on a stream of
    their own, while the step before them computes; positions are made there from the table of documents.
    """

    def __init__(
        self,
        stream: Stream,
        position: Position,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        depth: int = 2,
        *,
        process: bool = False,
    ) -> None:
        """process: batches are built in a process of their own, and the thread only hands them on."""
        self._stream = stream
        self._rank, self._world = rank, world
        self._device = torch.device(device)
        self._ready: queue.Queue[Fed | BaseException] = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._planner: threading.Thread | None = None
        self._planned = position.epoch
        self._builder = BuildProcess(BatchBuilder(stream.view)) if process else None
        self._thread = threading.Thread(target=self._run, args=(position,), name="headway-feeder", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Fed]:
        return self

    def __next__(self) -> Fed:
        """The next global batch; waits for it. Raises what the thread raised, and StopIteration once closed."""
        fed = self.within(math.inf)
        assert fed is not None  # there is no end to the time it has
        return fed

    def within(self, seconds: float) -> Fed | None:
        """The next global batch, or None where it is not there after so long. Raises as `__next__` does."""
        if self._failure is not None:
            raise self._failure
        fed = self._take(time.monotonic() + seconds)
        if isinstance(fed, BaseException):
            self._failure = fed
            raise fed
        return fed

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and wait for the threads. Batches not yet taken are discarded; may be called again."""
        self._closing.set()
        if self._builder is not None:
            self._builder.close()  # the thread may be waiting for it
        self._thread.join()
        # Only now: until the thread has ended it may still start a planner.
        if self._planner is not None:
            self._planner.join()

    def _run(self, position: Position) -> None:
        try:
            if self._device.type == "cuda" and self._device.index is not None:
                torch.cuda.set_device(self._device)  # a new thread is on GPU 0; pinning would claim memory there
            copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            while not self._closing.is_set():
                batch = self._stream.global_batch(position)
                self._plan_ahead(batch)
                self._offer(self._place(batch, copies))
                position = batch.next
        except BaseException as error:  # handed to the consumer, whatever it is: a silent end would hang the run
            self._offer(error)

    def _place(self, batch: GlobalBatch, copies: torch.cuda.Stream | None) -> Fed:
        if self._builder is not None:
            mine = self._builder.build(*batch.share(self._rank, self._world))
        else:
            mine = batch.micro_batches(self._rank, self._world)
        if copies is None:
            return Fed(batch, [each.to(self._device) for each in mine])
        with torch.cuda.stream(copies):
            placed = [each.pin_memory().to(self._device, non_blocking=True) for each in mine]
            copied = torch.cuda.Event()
            copied.record()
        return Fed(batch, placed, copied)

    def _take(self, until: float) -> Fed | BaseException | None:
        while not self._closing.is_set():
            # Not for ever: a signal handler may close the feeder while its consumer waits here.
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=0.1)
            if time.monotonic() > until:
                return None
        raise StopIteration

    def _offer(self, item: Fed | BaseException) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                return self._ready.put(item, timeout=0.1)

    def _plan_ahead(self, batch: GlobalBatch) -> None:
        """Plan the next epoch from the middle of this one on, so that its first batch does not wait for its plan."""
        following = batch.position.epoch + 1
        if self._planned == following or 2 * batch.next.documents < self._stream.plan(following - 1).documents:
            return
        if batch.next.epoch == following:
            return  # this very thread needs that plan next
        self._planned = following
        self._planner = threading.Thread(target=self._plan, args=(following,), name="headway-planner", daemon=True)
        self._planner.start()

    def _plan(self, epoch: int) -> None:
        # The feeding thread meets the same error, at the right time, when it gets there.
        with contextlib.suppress(Exception):
            self._stream.plan(epoch)
