"""What the tests of studies share."""

from __future__ import annotations

import pytest
from study.samples import quick_identity


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_identity(monkeypatch)
