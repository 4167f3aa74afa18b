"""The keeper of a node: the trainer's end of it, and the process. No torch.

`python -m headway.guard.keeper RUN_FOLDER`: the process reads what it needs from its input (the secret must not be seen
in a list of processes), says its port, and ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import headway
from headway.guard.orphans import KEEPER

_NICE = 10


class Keeper:
    """Takes parts of other nodes into `root` and gives those it holds. Raises OSError when it does not start.

    `run_folder`: whose run it is, for its command line (`guard.orphans`)."""

    def __init__(self, root: Path, node: str, secret: str, run_folder: Path) -> None:
        source = str(Path(headway.__file__).parent.parent)
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", KEEPER, str(run_folder.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(root), node, secret]).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.strip().isdigit():
            self.close()
            raise OSError("the keeper of memory checkpoints did not start")
        self.port = int(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.kill()
        self._process.wait()


def main() -> None:
    from headway.guard.peers import serve

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the trainer
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    root, node, secret = json.loads(sys.stdin.readline())
    with serve(Path(root), node, secret) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()  # until the trainer closes it, or dies
        os._exit(0)


if __name__ == "__main__":
    main()
