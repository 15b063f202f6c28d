"""The settings of a write-back that few runs need, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halfulp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class WriteBackOptions:
    """Settings of steps and telemetry: ``WriteBack(..., options=WriteBackOptions(telemetry=False))``.

    Args:
        nonfinite: ``count`` non-finite proposals and leave their weights unchanged, or ``raise`` before
            anything changes if a gradient is not finite.
        telemetry: Keep one bit per weight to know which never moved, and count what a step loses.
        materialise: Give ``native`` and ``packed`` weights to the optimizer ``all`` at once, or (the default
            for torch's optimizers) at most as many at a time as the largest ``tensor`` has, or four million.
        one_pass: Allow a step in one sweep over memory where that gives the same bits, see
            :mod:`halfulp.writeback.route`.

    Raises:
        UsageError: If an option has another value.
    """

    nonfinite: Literal["count", "raise"] = "count"
    telemetry: bool = True
    materialise: Literal["tensor", "all"] | None = None
    one_pass: bool = True

    def __post_init__(self) -> None:
        check_choice("nonfinite", self.nonfinite, ("count", "raise"))
        check_choice("materialise", self.materialise, (None, "tensor", "all"))


def check_choice(what: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Refuse a value that is not one of those allowed."""
    if value not in allowed:
        raise UsageError(f"{what} must be one of {', '.join(filter(None, allowed))}, not {value!r}.")
