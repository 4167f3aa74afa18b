"""`python -m headway.watch.send_alert`: sends one alert, read as JSON from standard input. Started by `alerts.py`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PAUSES_S = (0.0, 1.0, 5.0)
TIMEOUT_S = 10.0


def send(order: dict[str, Any]) -> str | None:
    """Posts to the webhook or starts the command, three times at most; returns why it did not arrive."""
    why = ""
    for pause in PAUSES_S:
        time.sleep(pause)
        try:
            if order["webhook"]:
                _post(order["webhook"], order["payload"])
            else:
                subprocess.run(
                    order["command"], input=json.dumps(order["payload"]).encode(), check=True, timeout=TIMEOUT_S
                )
            return None
        except (OSError, urllib.error.URLError, subprocess.SubprocessError, ValueError) as error:
            why = str(error)
    return why


def _post(address: str, payload: dict[str, Any]) -> None:
    body = json.dumps(payload).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        said = answer.read(1000)
    # DingTalk refuses with status 200: a keyword that is missing, too many messages a minute.
    with contextlib.suppress(ValueError):
        refusal = json.loads(said)
        if isinstance(refusal, dict) and refusal.get("errcode"):
            raise ConnectionError(f"refused: {refusal['errcode']} {refusal.get('errmsg', '')}")


if __name__ == "__main__":
    problem = send(json.load(sys.stdin))
    if problem is not None:
        # Without the address: it often has a token in it.
        print(f"headway: an alert did not arrive: {problem}", file=sys.stderr)
        sys.exit(1)
