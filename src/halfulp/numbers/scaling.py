"""Scales that are not folded into a grid's elements: where they come from, and which values share one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rule = Literal["given", "absmax", "absmean", "dqt", "mx", "nv"]
Per = Literal["tensor", "row", "group"]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The source of a grid's scale, when it is not folded into the element set.

    ``rule``: ``given`` (``scale``), ``absmax`` (largest magnitude / largest code), ``absmean``
    (mean magnitude / largest code), ``dqt`` (largest *signed* value of the old weights / largest
    code), ``mx`` (a power of two a block, OCP MX), ``nv`` (an e4m3 number a block).
    ``per``: one scale a ``tensor``, a ``row`` (the last dimension), or a ``group`` of ``size``
    consecutive values of a row. ``from_old``: the scale of a write-back comes from the weights
    before it; otherwise from the values being written.
    """

    rule: Rule
    per: Per = "tensor"
    size: int = 0
    scale: float = 0.0

    @property
    def moves(self) -> bool:
        """Return True if the scale follows the data."""
        return self.rule != "given"

    @property
    def from_old(self) -> bool:
        """Return True if the scale is that of the values before the step."""
        return self.rule == "dqt"

    @property
    def bytes_per_scale(self) -> int:
        """Return the bytes of a stored scale."""
        return 1 if self.rule in ("mx", "nv") else 4

    def segment_length(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(row length, segment length): which consecutive values share a scale."""
        numel = math.prod(shape)
        if self.per == "tensor" or numel == 0:
            return max(numel, 1), max(numel, 1)
        row = shape[-1] if shape else 1
        return row, row if self.per == "row" else min(self.size, row)

    def segments(self, shape: tuple[int, ...]) -> int:
        """Return the number of scales that a tensor of this shape has."""
        row, length = self.segment_length(shape)
        return math.prod(shape) // row * math.ceil(row / length)
