"""Alerts: their forms, once for many, few an hour, never waiting; against a server in this process."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.account.errors import UserError
from headway.account.events import Incident
from headway.config.alerts import AlertConfig, AlertsConfig
from headway.guard.ledger import Ledger
from headway.watch import send_alert
from headway.watch.alerts import Alerts, message, payload


def incident(number: int = 0, **changes: Any) -> Incident:
    known = {
        "fault": "hang",
        "step": 7,
        "time": 1.0,
        "monotonic_ns": 5,
        "host": "node1",
        "rank": 3,
        "evidence": "quiet",
    }
    return Incident(id=f"id{number}", **{**known, "action": "restarted", **changes})  # type: ignore[arg-type]


class Receiver(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.delay = 0.0
        self.says: list[bytes] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=secret"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        time.sleep(self.server.delay)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        code = self.server.answers.pop(0) if self.server.answers else 200
        if code == 200:
            self.server.got.append(json.loads(body))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(self.server.says.pop(0) if self.server.says else b"ok")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_forms_of_the_services() -> None:
    assert payload("slack", "big", incident()) == {"text": message("big", incident())}
    dingtalk = payload("dingtalk", "big", incident(), 4)
    assert dingtalk["msgtype"] == "text" and dingtalk["text"]["content"] == (
        "Headway run big: hang at step 7 (node1, rank 3)\nquiet\nAction: restarted\n"
        "The same 4 times more since the last alert"
    )
    assert len(message("big", incident(evidence="x" * 9000))) < 2000
    plain = payload("plain", "big", incident())
    assert plain["run"] == "big" and plain["fault"] == "hang" and plain["evidence"] == "quiet"


def test_once_for_many_and_few_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str, int]] = []
    monkeypatch.setattr(
        Alerts, "_start", lambda self, to, item, repeated: sent.append((to.shape, item.fault, repeated))
    )
    both = [AlertConfig(webhook="http://a"), AlertConfig(webhook="http://b", shape="slack", faults=["hang"])]
    clock = Clock()
    alerts = Alerts(AlertsConfig(to=both, repeat_s=100, per_hour=3), "run", clock)
    first = incident(0)
    alerts(first)
    alerts(first)  # an amendment
    for number in range(1, 6):
        alerts(incident(number))
    alerts(incident(6, fault="rank killed"))
    assert sent == [("plain", "hang", 0), ("slack", "hang", 0), ("plain", "rank killed", 0)]
    clock.now = 150.0
    alerts(incident(7))
    assert sent[3:] == [("plain", "hang", 5), ("slack", "hang", 5)]
    for number in range(8, 12):
        alerts(incident(number, host=f"node{number}"))
    assert [to for to, *_ in sent[5:]] == ["slack"], "the plain receiver has had its three of this hour"
    clock.now = 3800.0
    alerts(incident(20))
    assert [to for to, *_ in sent[6:]] == ["plain", "slack"]


def test_it_arrives_and_the_ledger_does_not_wait(receiver: Receiver, tmp_path: Path) -> None:
    receiver.delay = 1.0
    said = tmp_path / "said.json"
    copy = [sys.executable, "-c", f"import sys; open({str(said)!r}, 'w').write(sys.stdin.read())"]
    to = [AlertConfig(webhook=receiver.address, shape="slack"), AlertConfig(command=copy)]
    alerts = Alerts(AlertsConfig(to=to), "big")
    ledger = Ledger(tmp_path / "incidents.jsonl", listeners=[alerts])
    ledger.record("hang", 7, rank=3, host="node1", evidence="quiet", action="restarted")
    assert receiver.got == [], "recording has waited for a receiver that takes a second"
    alerts.wait()
    assert receiver.got == [{"text": "Headway run big: hang at step 7 (node1, rank 3)\nquiet\nAction: restarted"}]
    assert json.loads(said.read_text())["fault"] == "hang"


def test_a_receiver_that_is_down_is_tried_again(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_alert, "PAUSES_S", (0.0, 0.0, 0.0))
    receiver.answers = [503, 500]
    assert send_alert.send({"webhook": receiver.address, "command": None, "payload": {"a": 1}}) is None
    assert receiver.got == [{"a": 1}]
    receiver.answers = [503] * 3
    why = send_alert.send({"webhook": receiver.address, "command": None, "payload": {}})
    assert why is not None and "503" in why and "secret" not in why
    assert send_alert.send({"webhook": None, "command": ["no-such-program"], "payload": {}}) is not None


def test_dingtalk_refuses_with_status_200(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_alert, "PAUSES_S", (0.0, 0.0))
    order = {"webhook": receiver.address, "command": None, "payload": {}}
    receiver.says = [b'{"errcode": 310000, "errmsg": "keywords not in content"}'] * 2
    assert "310000 keywords not in content" in str(send_alert.send(order))
    receiver.says = [b'{"errcode": 130101, "errmsg": "send too fast"}', b'{"errcode": 0, "errmsg": "ok"}']
    assert send_alert.send(order) is None


def test_an_alert_needs_one_way_out() -> None:
    for values in ({}, {"webhook": "http://a", "command": ["b"]}, {"webhook": "ftp://a"}):
        with pytest.raises((ValueError, UserError)):
            AlertConfig(**values)  # type: ignore[arg-type]
