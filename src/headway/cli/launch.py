"""`headway launch RUN.yaml`: `headway train` on this machine's ranks, under supervision, however few they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headway.config.run import RunConfig
    from headway.guard.hosts import HostList
    from headway.guard.nodes.meeting import Meeting


def launch(
    run_file: Annotated[Path, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. data.seq_len=4096.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start here (default: as the run file says).", min=1)
    ] = None,
    hang_s: Annotated[float, typer.Option(help="Least seconds without progress in a step that are a hang.")] = 5.0,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            help="Go on with fewer ranks, down to this number, without places that fail again and again.", min=1
        ),
    ] = None,
    exclude_after: Annotated[
        int, typer.Option(help="Own incidents after which a place (GPU, host) is left out.", min=1)
    ] = 3,
    readmit: Annotated[list[str] | None, typer.Option(help="Let an excluded place take part again.")] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            envvar=["HEADWAY_NNODES", "PET_NNODES"],
            help="Machines; start this command on each. More than MAX wait as spares, MIN are enough to go on.",
        ),
    ] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar=["HEADWAY_RDZV", "PET_RDZV_ENDPOINT"],
            help="Where they meet: one of the machines, and a free port there.",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            envvar=["HEADWAY_NODE", "SLURMD_NODENAME"],
            help="This agent's name in hosts.json (default: its host's); no two may have one.",
        ),
    ] = None,
    wait_s: Annotated[float, typer.Option(help="With MIN machines there: seconds to wait for more.")] = 30.0,
    lost_s: Annotated[float, typer.Option(help="Seconds without a sign of life after which a machine is lost.")] = 1.5,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Train under the supervisor: a rank that dies or hangs is noticed and all are started again, also a single one.

    `headway train` does the same by itself where it starts more than one rank. Every death is in incidents.jsonl. Over
    several machines, give all of them the same command (srun, a pod each): the run folder must be one that all see.
    Two agents on one machine need a --node each.

    Example: headway launch run.yaml --nnodes 3:4 --rdzv node-01:29400
    """
    from headway.account.errors import UserError
    from headway.cli.train import launch_supervised, ranks_to_start
    from headway.config.load import load_run
    from headway.guard.hosts import HostList
    from headway.record.folder import RunFolder

    config = load_run(run_file, overrides or []).config
    argv = ["train", str(run_file), *(overrides or []), *(["--json"] if json else [])]
    if "--debug" in sys.argv:
        argv.append("--debug")
    meeting = _meeting(config, nnodes, rdzv, node, wait_s, lost_s)
    fewer = "--min-ranks" if min_ranks is not None else "--nnodes MIN:MAX"
    elastic = min_ranks is not None or (meeting is not None and meeting.limits.fewest < meeting.limits.most)
    if elastic and not (config.train.global_batch_sequences or config.train.global_batch_tokens):
        raise UserError(f"{fewer} keeps the global batch: set train.global_batch_sequences or global_batch_tokens")
    hosts = HostList(RunFolder(config.folder).create().root / "hosts.json", exclude_after)
    for place in readmit or []:
        hosts.readmit(place)
    if meeting is not None and not _sound(meeting.host, hosts):
        return 1
    return launch_supervised(config, ranks or ranks_to_start(config), argv, hang_s, min_ranks, hosts, meeting)


def _meeting(
    config: RunConfig, nnodes: str | None, rdzv: str | None, node: str | None, wait_s: float, lost_s: float
) -> Meeting | None:
    """None for a run on one machine. Raises UserError, naming the option."""
    import socket

    from headway.account.errors import UserError

    if nnodes is None and rdzv is None:
        return None
    if nnodes is None or rdzv is None:
        raise UserError("--nnodes and --rdzv belong together: how many machines, and where they meet")
    from headway.guard.nodes.leader import Limits
    from headway.guard.nodes.meeting import Meeting
    from headway.record.folder import RunFolder

    fewest, colon, most = nnodes.partition(":")
    if not fewest.isdigit() or (colon and not most.isdigit()) or not 1 <= int(fewest) <= int(most or fewest):
        raise UserError(f"--nnodes {nnodes}: write MIN:MAX, e.g. 3:4, or one number")
    address, _, port = rdzv.rpartition(":")
    if not address or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise UserError(f"--rdzv {rdzv}: write HOST:PORT, e.g. node-01:29400")
    if lost_s < 0.5:
        raise UserError(f"--lost-s {lost_s:g}: at least 0.5, agents are heard four times a second")
    if node is not None:
        os.environ["HEADWAY_NODE"] = node
    place = RunFolder(config.folder).create().root / "meeting.json"
    limits = Limits(int(fewest), int(most or fewest), wait_s)
    return Meeting(address, int(port), limits, node or socket.gethostname(), place, lost_s)


def _sound(host: str, hosts: HostList) -> bool:
    """A machine that has failed before is put to the test before it comes back."""
    entry = hosts.hosts.get(host)
    if entry is None or not entry.incidents:
        return True
    from headway.guard.node_check import examine_node

    bad = [finding for finding in examine_node(seconds=1.0) if finding.verdict == "bad"]
    for finding in bad:
        print(f"headway: {host} does not come back: {finding.check}: {finding.text}", file=sys.stderr)
    return not bad


def register(app: typer.Typer) -> None:
    app.command()(launch)
