"""The libraries of others, where they are installed."""

from __future__ import annotations

import functools

import pytest

from halfulp.integrations import piloted
from halfulp.pilots.pilot import Pilot


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are counted in sequences, so that no plan depends on the machine."""
    monkeypatch.setattr(piloted, "Pilot", functools.partial(Pilot, cost=lambda part: part / 8))
