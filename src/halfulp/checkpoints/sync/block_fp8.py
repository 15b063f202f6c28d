"""fp8 weights with a scale for each block of 128 x 128, as samplers hold them (``weight_scale_inv``).

Of a block w the scale is max|w| / 448, in float32, and the code is w / scale rounded to e4m3 (nearest, ties
to even); the sampler multiplies: w is about code * scale. (The name says the inverse of the scale that
multiplied the weight; DeepSeek's checkpoints and what reads them mean the factor of decoding.) With
``power_of_two`` the scale is the next power of two: it seldom changes between two syncs, and where it does
not, a code changes only when its own weight does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfulp.documents import whole
from halfulp.errors import UsageError
from halfulp.numbers.grids import grid
from halfulp.text import several, shown

LARGEST = 448.0


@dataclass(frozen=True)
class BlockFp8:
    """The block-scaled fp8 format of a sampler, and the tensors that it stores in it.

    Args:
        block: The number of rows and of columns of a block; at the edges blocks are smaller.
        left: Substrings of the names of tensors that stay as they are, one or several. So do tensors that do
            not have exactly two dimensions.
        suffix: The suffix that the name of a tensor's scales adds to the name of the tensor.
        power_of_two: Round scales up to powers of two.

    Raises:
        UsageError: If the block is not a whole number from 1 on, or ``left`` is not text.

    >>> codes, scales = BlockFp8(block=2).quantize("w", torch.tensor([[448.0, 1.0, 3.0]]))
    >>> codes.float(), scales
    (tensor([[448.,   1., 448.]]), tensor([[1.0000, 0.0067]]))
    """

    block: int = 128
    left: str | Sequence[str] = ("embed", "lm_head", "norm")
    suffix: str = "_scale_inv"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if not whole(self.block, 1):
            raise UsageError(f"block is a whole number of rows and columns from 1 on, not {self.block!r}.")
        if (left := several(self.left)) is None:
            raise UsageError(f"left takes parts of names, such as 'embed', not {self.left!r}.")
        object.__setattr__(self, "left", left)

    def takes(self, name: str, x: torch.Tensor) -> bool:
        """Return True if this tensor is stored as codes.

        Args:
            name: The name of the tensor.
            x: The tensor.
        """
        return x.is_floating_point() and x.dim() == 2 and not any(part in name for part in self.left)

    def quantize(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes (``float8_e4m3fn``) and the scales of the blocks (float32).

        Args:
            name: The name of the tensor, for errors.
            x: The tensor.

        Raises:
            UsageError: If a value is not finite.
        """
        rows, columns = ((n + self.block - 1) // self.block for n in x.shape)
        w = x.detach().float()
        padded = w.new_zeros(rows * self.block, columns * self.block)
        padded[: w.shape[0], : w.shape[1]] = w
        blocks = padded.reshape(rows, self.block, columns, self.block)
        largest = blocks.abs().amax(dim=(1, 3))
        if not bool(torch.isfinite(largest).all()):
            raise UsageError(f"{shown(name)!r} has values that are not finite: they have no code in fp8.")
        scales = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        scales = torch.where(largest == 0, torch.ones_like(scales), scales)
        if self.power_of_two:
            mantissa, exponent = torch.frexp(scales)
            up = exponent - (mantissa == 0.5).to(exponent.dtype)
            scales = torch.ldexp(torch.ones_like(scales), up)
        each = scales.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        codes = grid("e4m3").encode(w / each[: w.shape[0], : w.shape[1]])
        return codes.to(torch.uint8).view(torch.float8_e4m3fn), scales

    def values(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the weights that codes and scales stand for, in float32."""
        each = scales.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return codes.float() * each[: codes.shape[0], : codes.shape[1]]
