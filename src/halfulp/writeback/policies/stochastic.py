"""Implement ``sr`` and ``deadzone-sr``: stochastic rounding, everywhere or where nearest rounding loses.

Both draw from one stream, keyed by seed, name, step and global element, so their draws are coupled.
"""

from __future__ import annotations

from typing import ClassVar

from halfulp.kernels import Written
from halfulp.writeback.policies.policy import Kernel, Policy, Step

RIGHT_ON_AVERAGE = "a small update moves a weight seldom, but by a whole gap, and is right on average"


class Stochastic(Policy):
    """Stochastic rounding: write a random neighbour of z that equals z in expectation.

    >>> import torch
    >>> import halfulp as hu
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> opt = hu.AdamW(model.parameters(), lr=1e-5, policy="sr", seed=1)
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    >>> 0 < opt.events.frozen < 1
    True
    """

    name: ClassVar[str] = "sr"
    words: ClassVar[str] = "stochastic"
    stochastic: ClassVar[bool] = True
    kernel: ClassVar[Kernel | None] = Kernel(mode="stochastic")
    offers: ClassVar[tuple[tuple[str, float], ...]] = (("sr", 0.0),)
    why_kept: ClassVar[str] = RIGHT_ON_AVERAGE

    def after(self, step: Step) -> Written:
        """Round stochastically."""
        return step.write("stochastic")


class DeadzoneStochastic(Policy):
    """Nearest rounding, but stochastic where nearest rounding would lose a non-zero proposal.

    >>> import halfulp as hu
    >>> hu.writeback.policy("deadzone-sr")
    DeadzoneStochastic()
    """

    name: ClassVar[str] = "deadzone-sr"
    words: ClassVar[str] = "stochastic in the dead zone"
    stochastic: ClassVar[bool] = True
    kernel: ClassVar[Kernel | None] = Kernel(mode="deadzone")
    why_kept: ClassVar[str] = RIGHT_ON_AVERAGE

    def after(self, step: Step) -> Written:
        """Round stochastically within the dead zone, to nearest outside."""
        return step.write("deadzone")
