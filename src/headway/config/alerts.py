"""The run file's `alerts` section: who is told when something breaks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.config.base import Section, fault


class AlertConfig(Section):
    """One receiver of alerts: a webhook or a command."""

    webhook: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="Address that incidents are posted to as JSON; null where a command is given.",
    )
    shape: Literal["plain", "slack", "dingtalk"] = Field(
        default="plain",
        description="Form of what is posted: the incident as it is in the ledger, or a text as Slack or DingTalk "
        "take it.",
    )
    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments that are started with the incident as JSON on standard input.",
    )
    faults: list[str] = Field(
        default_factory=list,
        description="Only faults with these names are told; empty for all.",
    )

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
