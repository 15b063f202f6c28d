"""Implement ``rne``: round to nearest even."""

from __future__ import annotations

from typing import ClassVar

from halfulp.writeback.policies.policy import Kernel, Policy


class Nearest(Policy):
    """Nearest rounding: write Q(z), which loses every proposal below half a gap.

    >>> import torch
    >>> import halfulp as hu
    >>> _ = torch.manual_seed(0)  # a weight near zero would move
    >>> model = torch.nn.Linear(4, 4).bfloat16()
    >>> opt = hu.AdamW(model.parameters(), lr=1e-6, policy="rne")
    >>> model(torch.ones(1, 4).bfloat16()).sum().backward()
    >>> opt.step()
    >>> opt.events["0.0"].frozen
    16
    """

    name: ClassVar[str] = "rne"
    words: ClassVar[str] = "nearest"
    precise: ClassVar[bool] = False
    kernel: ClassVar[Kernel | None] = Kernel()
