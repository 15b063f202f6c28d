"""``halfulp calibrate``, for one version after its end."""

from __future__ import annotations

import typer

from halfulp.deprecation import CALIBRATION
from halfulp.errors import UsageError


def calibrate(_: typer.Context) -> None:
    """Say what has taken its place."""
    raise UsageError(CALIBRATION)
