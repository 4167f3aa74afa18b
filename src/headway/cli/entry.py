"""Where the `headway` command begins: nothing is imported yet, so that Ctrl-C during the imports ends it quietly."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

from headway.cli.starting import answer_sigterm


def main() -> None:
    """Imports the command line with the system's own Ctrl-C, then hands over."""
    ours = signal.getsignal(signal.SIGINT)
    # Python's handler would raise inside whatever is being imported, and print a traceback of that.
    if ours is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    answer_sigterm(sys.argv[1:])
    from headway.cli.main import main as run

    signal.signal(signal.SIGINT, ours)
    try:
        run()
    except SystemExit as leaving:
        children = sys.modules.get("multiprocessing.process")
        if children is not None and children.parent_process() is not None:
            raise  # under `torchrun --run-path`, which waits for what its own child says at its end
        _leave(leaving.code)


def _leave(code: object) -> NoReturn:
    """Ends the process as the interpreter would, but for taking thousands of modules apart one by one: with torch that
    lasts two seconds of a core, after the last line, and is in no account of the run."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as at every exit
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it is gone, or it is closed
            stream.flush()
    os._exit(code or 0)
