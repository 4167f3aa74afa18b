"""`headway data prepare|inspect`; `quarantine` has a file of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headway.account.errors import UserError
from headway.cli import data_quarantine
from headway.cli.output import print_json
from headway.cli.progress import progress

app = typer.Typer(no_args_is_help=True, help="Prepare chats and text once, offline; look at what training will see.")

app.add_typer(data_quarantine.app, name="quarantine")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_SHARED_KEYS = re.compile(r"(?<![\w./-])data\.(format|labels|max_bad|chat_template)(?![\w./-])")


@contextmanager
def _keys_as_options() -> Iterator[None]:
    """The data room names the keys of a run file; here there is none, and each key is an option."""
    try:
        yield
    except UserError as error:
        raise type(error)(_SHARED_KEYS.sub(lambda key: "--" + key[1].replace("_", "-"), str(error))) from error


@app.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(help="Files, folders or globs of chats or text.")],
    tokenizer: Annotated[str, typer.Option(help="Folder of the model's tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards.")],
    format: Annotated[str, typer.Option(help="How documents are written; auto detects it per file.")] = "auto",
    labels: Annotated[str, typer.Option(help="Train all assistant turns, or the last.")] = "all",
    max_bad: Annotated[
        float, typer.Option(min=0, max=1, help="Share of bad records above which it is an error.")
    ] = 0.01,
    chat_template: Annotated[str | None, typer.Option(help="Jinja file in place of the tokenizer's template.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a core).")] = None,
    json: Json = False,
) -> None:
    """Turn chats or text into tokens, labels and shards. Idempotent; resumes after a kill.

    Example: headway data prepare chats.jsonl --tokenizer model/ --out shards/
    """
    from headway.data.options import PrepareOptions
    from headway.data.prepare import prepare as run_prepare
    from headway.data.report_text import report_lines, report_record

    with _keys_as_options():
        options = PrepareOptions(format=format, labels=labels, max_bad=max_bad, chat_template=chat_template)  # type: ignore[arg-type]
        report = run_prepare(
            sources,
            out,
            tokenizer,
            options=options,
            workers=workers,
            progress=None if json else progress(),
            tokenizer_key="--tokenizer",
        )
    if json:
        print_json(report_record(report))
        return
    for line in report_lines(report):
        print(line)


@app.command()
def inspect(
    shards: Annotated[Path, typer.Argument(help="A folder of shards, or the prefix of a Megatron .bin and .idx.")],
    show: Annotated[int, typer.Option(min=0, help="Samples to print, trained tokens highlighted.")] = 0,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, where it has moved.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Also count what is overlong at this length.")] = None,
    json: Json = False,
) -> None:
    """Show what a folder of shards holds, and samples as training will see them.

    Example: headway data inspect shards/ --show 3
    """
    from headway.data.inspect import inspect_folder, render_sample
    from headway.data.report_text import inspect_lines, inspect_record
    from headway.watch.console import make_console

    report = inspect_folder(shards, show, tokenizer)
    if json:
        print_json(inspect_record(report, seq_len))
        return
    for line in inspect_lines(report, seq_len):
        print(line)
    console = make_console()
    for sample in report.samples:
        if console.is_terminal:
            console.print(render_sample(sample), soft_wrap=True)
        else:
            print(f"{sample.file}:{sample.line}  {sample.tokens} tokens, {sample.trained} trained\n{sample.plain}")
