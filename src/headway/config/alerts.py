"""The run file's `alerts` section: who is told when something breaks."""

from __future__ import annotations

import difflib
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headway.account.faults import FAULTS
from headway.config.base import Section, fault, marks


class AlertConfig(Section):
    """One receiver of alerts: a webhook or a command."""

    webhook: str | None = Field(
        default=None,
        description="Address that incidents are posted to as JSON; null where a command is given.",
        json_schema_extra=marks(allowed="an address like https://host/path, or null"),
    )
    shape: Literal["plain", "slack", "dingtalk"] = Field(
        default="plain",
        description="Form of what is posted: the incident as it is in the ledger, or a text as Slack or DingTalk "
        "take it.",
    )
    command: list[str] | None = Field(
        default=None,
        description="Program and arguments that are started with the incident as JSON on standard input.",
        json_schema_extra=marks(allowed="a list of a program and its arguments, e.g. [mail, me@host], or null"),
    )
    faults: list[str] = Field(
        default_factory=list,
        description="Only faults with these names (docs/faults.md) are told; empty for all.",
        json_schema_extra=marks(allowed=f"a list of names of faults: {', '.join(FAULTS)}"),
    )

    @field_validator("webhook")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "")
        if value is not None and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("no http:// or https:// address of a host")
        return value

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not (value and value[0].strip()):
            raise ValueError("names no program")
        return value

    @field_validator("faults")
    @classmethod
    def _exist(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in FAULTS:
                near = difflib.get_close_matches(name, FAULTS, n=1)
                raise ValueError(f"no fault is called {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        return value

    @model_validator(mode="after")
    def _one_way(self) -> AlertConfig:
        if (self.webhook is None) == (self.command is None):
            raise fault("alerts", "give each alert either a webhook or a command")
        return self


class AlertsConfig(Section):
    """Alerts that leave the machine when an incident is written down."""

    to: list[AlertConfig] = Field(
        default_factory=list,
        description="Receivers, each with a webhook or a command; empty tells nobody.",
    )
    repeat_s: float = Field(
        default=600.0,
        ge=0,
        description="Seconds in which the same fault of the same host is told only once; the next alert says how often "
        "it came.",
    )
    per_hour: int = Field(
        default=20,
        ge=1,
        description="Most alerts an hour for each receiver; a storm must not hide the one that matters.",
    )
