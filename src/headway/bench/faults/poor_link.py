"""A line between two machines as it is on a bad day: late, and with lost packets, by a seeded plan.

TCP hides a lost packet as a wait for its second sending: that is what a proxy can do to a stream. Real loss needs the
kernel (`tc netem`), which containers seldom have.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from contextlib import suppress

from headway.guard.processes import die_with_parent

_RESEND_S = 0.2
_CHUNK = 1 << 16


class PoorLink:
    """A process that hands on what comes to `port` to `target` on this machine, and back: each piece `delay_s` late,
    a share `loss` of them by a resend later."""

    def __init__(self, target: int, seed: int, delay_s: float = 0.05, loss: float = 0.05) -> None:
        self._target, self._dice, self._delay_s, self._loss = target, random.Random(seed), delay_s, loss
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        ask = die_with_parent()
        self._pid = os.fork()
        if not self._pid:
            try:
                if ask is not None:
                    ask()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                asyncio.run(self._serve(listener))
            finally:
                os._exit(0)
        listener.close()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._join, sock=listener)
        await server.serve_forever()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._carry(reader, far[1]), self._carry(far[0], writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_CHUNK):
                lost = self._dice.random() < self._loss
                await asyncio.sleep(self._delay_s + (_RESEND_S if lost else 0.0))
                writer.write(piece)
                await writer.drain()
        writer.close()
