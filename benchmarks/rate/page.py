"""Slopes, the chart and the page, made from the records and from nothing else."""

from __future__ import annotations

from typing import Any


def chart(records: list[dict[str, Any]]) -> str:
    return ""


def render(kept: dict[str, Any]) -> str:
    return ""
