"""The `headway` command: joins the sub-commands, turns errors into one line and an exit code."""

from __future__ import annotations

import functools
import io
import sys
from typing import Any

import typer

from headway.account.errors import UserError
from headway.cli.quiet import quiet_libraries

BAD_NEWS, BAD_INPUT, PARTIAL, PREEMPTED = 1, 2, 3, 75

# Newer typers bring a click of their own: the class to catch is whatever typer raises.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="headway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Trains large language models so that every second paid for becomes a parameter update.",
    epilog="Example: headway train run.yaml data.seq_len=4096    Exit codes: 0 good, 1 bad news, 2 bad input, "
    "3 partial answer, 75 stopped with the state saved.",
)


@functools.cache
def _join_commands() -> None:
    """Once a process: joined again, every command would be there twice, and each call slower than the one before."""
    from headway.cli import (
        bench,
        checkpoint,
        data,
        diagnose,
        doctor,
        incidents,
        launch,
        plan,
        report,
        train,
        tune,
        verify,
    )

    for module in (train, launch, tune, verify, diagnose, report, incidents, doctor):
        module.register(app)
    app.add_typer(data.app, name="data")
    app.add_typer(checkpoint.app, name="checkpoint")
    app.add_typer(bench.app, name="bench")
    app.add_typer(plan.app, name="plan")


@functools.cache
def _command() -> Any:
    """All of them as one command. Made once a process: that takes longer than most commands."""
    _join_commands()
    return typer.main.get_command(app)


def main(argv: list[str] | None = None) -> None:
    """Runs a command and exits. `--debug` anywhere shows tracebacks of user errors too."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    quiet_libraries()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old encoding must not end a run at the first dash
    sys.exit(_run(arguments, debug))


def _show_usage(error: Any) -> None:
    """One line, as for every other mistake; a group called without a command shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    said = " ".join(error.format_message().split()).rstrip(".")
    path = error.ctx.command_path if error.ctx else "headway"
    print(f"headway: {said}; `{path} --help` lists what there is", file=sys.stderr)


def _is_out_of_memory(error: RuntimeError) -> bool:
    if "torch" not in sys.modules:
        return False
    from headway.parallel.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        result = _command()(args=arguments, prog_name="headway", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except UserError as error:
        if debug:
            raise
        print(f"headway: {error}", file=sys.stderr)
        return error.exit_code
    except _USAGE_ERROR as error:
        _show_usage(error)
        return BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        print("headway: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough.
        sys.stderr.close()
        return 0
    except UnicodeEncodeError as error:
        if debug or "utf-8" in error.encoding:
            raise
        print(f"headway: this terminal's encoding is {error.encoding}; start with PYTHONUTF8=1", file=sys.stderr)
        return BAD_INPUT
    except RuntimeError as error:
        if debug or not _is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0].rstrip(".")
        print(
            f"headway: {said}: lower data.slots, shard over more ranks (parallel.fsdp) or set model.recompute=full; "
            "--debug shows where it was",
            file=sys.stderr,
        )
        return BAD_NEWS
    except OSError as error:
        if debug:
            raise
        print(f"headway: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return BAD_NEWS


if __name__ == "__main__":
    main()
