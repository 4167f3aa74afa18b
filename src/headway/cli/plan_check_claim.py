"""`headway plan check-claim`: do these figures fit together?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from headway.cli.output import print_json
from headway.cli.plan_options import Json


def check_claim(
    claim: Annotated[
        list[str], typer.Argument(help="A YAML file, case-1024, case-27b, or key=value pairs (docs/claims.md).")
    ],
    json: Json = False,
) -> int:
    """Check from first principles whether the figures of a claim can all be true; exit code 1 when they cannot.

    Example: headway plan check-claim device=H800 gpus=1024 parameters=1e12 global_batch=512 seq=4096 step_s=58.3
    """
    from headway.account.errors import UserError
    from headway.plan.claim import load_claim
    from headway.plan.claim_speedup import check_speedup
    from headway.plan.claim_step import check_step

    read = load_claim(claim)
    findings = [*check_step(read), *check_speedup(read)]
    if not findings:
        raise UserError(
            f"{read.name}: too few figures to check; give e.g. device, gpus, parameters, global_batch, seq, step_s"
        )
    bad = sum(finding.verdict == "does not fit" for finding in findings)
    if json:
        print_json({"claim": read.name, "contradictions": bad, "findings": [asdict(finding) for finding in findings]})
    else:
        print(read.name)
        print("\n".join(finding.line() for finding in findings))
        print(f"{bad} of {len(findings)} checks do not fit." if bad else "Nothing here contradicts itself.")
    return 1 if bad else 0


def register(app: typer.Typer) -> None:
    app.command("check-claim")(check_claim)
