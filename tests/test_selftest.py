"""``halfulp selftest``: what is equal is said to be, and what is not fails."""

from __future__ import annotations

import pytest
import torch

import halfulp as hu
from halfulp import kernels, selftest


def page(device: str = "cpu") -> tuple[bool, list[str]]:
    lines: list[str] = []
    return selftest.run(device, 0, lines.append), lines


def test_this_machine_is_the_reference() -> None:
    fine, lines = page()
    assert fine, "\n".join(lines)
    assert "halfulp" in lines[0]
    assert sum("equal, " in line for line in lines) >= len(selftest.CHECKS) - 1
    assert lines[-1] == "Everything is equal to the reference."


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One value off by its last bit, in one grid of ten."""
    honest = kernels.round

    def wrong(x: torch.Tensor, grid: hu.Grid, *args: object) -> torch.Tensor:
        made = honest(x, grid, *args)  # type: ignore[arg-type]  # as given
        if grid.name == "mxfp4":
            made.view(-1)[7].view(torch.int32).bitwise_xor_(1)
        return made

    monkeypatch.setattr(selftest.kernels, "round", wrong)
    monkeypatch.setattr(selftest, "CHECKS", {"rounding": selftest.CHECKS["rounding is the reference's"]})
    fine, lines = page()
    assert not fine
    assert any("FAILED, mxfp4, nearest: 1 of " in line for line in lines)


def test_devices() -> None:
    with pytest.raises(hu.UsageError, match="cpu or cuda"):
        page("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(hu.UsageError, match="no CUDA device"):
            page("cuda")
