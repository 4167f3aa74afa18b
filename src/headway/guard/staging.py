"""Copies a state into memory while training goes on, up to the next optimizer step.

Between two optimizer steps parameters and optimizer state do not change, so their copy may run beside the next
forward and backward pass; the optimizer waits at the fence. Everything else (buffers, learning rates that are tensors)
is copied before `start` returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from headway.guard.crash import crash_point
from headway.guard.host_file import HostFile, copy_bytes

_STEADY = ("model.", "optimizer.state.")


class Stager:
    """One copy at a time. `waited_s`: how long fences have held training up so far, seconds."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-stage")
        self._running: Future[None] | None = None
        self._queued = threading.Event()  # on a CPU: copied
        self._done: torch.cuda.Event | None = None
        self.waited_s = 0.0

    def start(
        self,
        sources: Sequence[Tensor],
        moving: Set[str],
        step: int,
        host: HostFile,
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Begins the copy of `sources`, in the order of the image's places, into `host`.

        `then` is called on the copying thread when the state may change, with what went wrong.
        `moving`: keys under "model" that change between optimizer steps (buffers).
        """
        self.fence()
        later: list[tuple[Tensor, Tensor]] = []
        for place, target, source in zip(host.image.places, host.targets, sources, strict=True):
            key = place.index.fqn
            if key.startswith(_STEADY) and key not in moving:
                later.append((target, source))
            else:
                target.copy_(source)
        if self._cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        self._queued.clear()
        self._done = None
        device = torch.cuda.current_device() if self._cuda else None
        self._running = self._threads.submit(self._copy, later, step, device, then)

    def fence(self) -> None:
        """Returns when the state may change; called before every optimizer step. Nothing to wait for is the rule."""
        if self._running is None:
            return
        started = time.perf_counter()
        self._queued.wait()
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)  # the device waits, not the host
        self.waited_s += time.perf_counter() - started
        self._running = None

    def close(self) -> None:
        self.fence()
        self._threads.shutdown(wait=True)

    def _copy(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        step: int,
        device: int | None,
        then: Callable[[BaseException | None], None],
    ) -> None:
        try:
            try:
                if device is None:
                    self._copy_all(pairs, step)
                else:
                    torch.cuda.set_device(device)
                    with torch.cuda.stream(self._stream):
                        self._copy_all(pairs, step)
                        self._done = torch.cuda.Event()
                        self._done.record()
            finally:
                self._queued.set()
            if self._done is not None:
                self._done.synchronize()
            crash_point("staged", step)
        except BaseException as problem:
            then(problem)
        else:
            then(None)

    def _copy_all(self, pairs: list[tuple[Tensor, Tensor]], step: int) -> None:
        for count, (target, source) in enumerate(pairs):
            if count == len(pairs) // 2:
                crash_point("mid-stage", step)
            copy_bytes(target, source)
