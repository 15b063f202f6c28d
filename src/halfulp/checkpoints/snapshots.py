"""Keep the stored values of the last sync, and find the current values that differ from them.

:class:`WholeBits` keeps all bits. :class:`LowByte` keeps the lower byte of a bf16 value: one bit of the
exponent and the mantissa. Two different finite values with the same lower byte are apart by a factor of 4 or
more, or their signs differ, so the distance is at least 3/4 of the older one. If no value moves by ``bound``
plus a quarter of itself or more, a change can therefore hide only in values below ``2 * bound`` (among them
the two zeros); of these few all bits are kept. A value that is not finite is looked at in any case. Without a
bound nothing can be proved: a bias that begins at 0 and moves by exactly 2^-11 has the same lower byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.checkpoints import counting
from halfulp.checkpoints.counting import PIECE
from halfulp.checkpoints.receiving import as_bits
from halfulp.errors import UsageError

Array = npt.NDArray[Any]
INFINITY = 0x7F80
SIDE_BYTES = 10
"""Of a value whose bits are all kept: its place in eight, and two."""


class WholeBits:
    """A snapshot of all bits of a tensor."""

    def __init__(self, bits: torch.Tensor) -> None:
        self.kept = bits.clone()

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the snapshot takes."""
        return self.kept.numel() * self.kept.element_size()

    def differing(self, new: torch.Tensor) -> tuple[Array, int]:
        """Return where values differ, as the bytes of a mask on the CPU, and in how many places."""
        check_alike(self.kept.dtype, self.kept.numel(), new)
        if new.device.type != "cpu":
            return packed(self.kept != new)
        mask = np.empty((new.numel() + 7) // 8, dtype=np.uint8)
        return mask, counting.differing(self.kept.numpy(), new.numpy(), mask)

    def take(self, new: torch.Tensor, _at: Array) -> None:
        """Replace the snapshot by the current bits, which differ at these positions."""
        self.kept.copy_(new)

    def bits(self, _now: torch.Tensor) -> torch.Tensor:
        """Return the bits of the last sync."""
        return self.kept


class LowByte:
    """A snapshot of one byte of each bf16 value, and of all bits of those below ``2 * bound``."""

    def __init__(self, bits: torch.Tensor, bound: float) -> None:
        # Magnitudes are in the order of their bits, so no value below the limit has larger ones.
        self.limit = int(as_bits(torch.tensor([2 * bound]).bfloat16())[0]) + 1
        self.low = _low(bits).clone()
        starts = range(0, bits.numel(), PIECE)
        self._keep(bits, torch.cat([self._small(bits[a : a + PIECE]) + a for a in starts]))

    def _small(self, bits: torch.Tensor) -> torch.Tensor:
        """Find the values of which all bits must be kept."""
        magnitude = bits & 0x7FFF
        return ((magnitude <= self.limit) | (magnitude >= INFINITY)).nonzero()[:, 0]

    def _keep(self, bits: torch.Tensor, places: torch.Tensor) -> None:
        self.small, self.small_bits = places, bits[places]

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the snapshot takes."""
        return self.low.numel() + SIDE_BYTES * self.small.numel()

    def differing(self, new: torch.Tensor) -> tuple[Array, int]:
        """Return where values differ, as the bytes of a mask on the CPU, and in how many places."""
        check_alike(torch.int16, self.low.numel(), new)
        changed = new[self.small] != self.small_bits
        masks, count = [], 0
        for a in range(0, new.numel(), PIECE):
            piece = new[a : a + PIECE]
            differ = (self.low[a : a + PIECE] != _low(piece)) | ((piece & INFINITY) == INFINITY)
            first, last = torch.searchsorted(self.small, torch.tensor([a, a + PIECE])).tolist()
            differ[self.small[first:last] - a] = changed[first:last]
            mask, some = packed(differ)
            masks.append(mask)
            count += some
        return np.concatenate(masks), count

    def take(self, new: torch.Tensor, at: Array) -> None:
        """Update the snapshot to the current bits, which differ at these positions."""
        places = torch.from_numpy(at).to(new.device)
        self.low[places] = _low(new[places])
        near = torch.unique(torch.cat([self.small, places]))
        self._keep(new, near[self._small(new[near])])

    def bits(self, now: torch.Tensor) -> torch.Tensor:
        """Return the bits of the last sync, which are known only if nothing has changed since."""
        if self.differing(now)[1]:
            raise UsageError(
                "with bound= only one byte of the last sync's values is kept: call take() first, then full()."
            )
        return now


def snapshot(x: torch.Tensor, bound: float | None) -> WholeBits | LowByte:
    """Take a snapshot of a tensor, with one byte per value where that is enough."""
    bits = as_bits(x)
    if bound is not None and x.dtype == torch.bfloat16:
        low = LowByte(bits, bound)
        if low.kept_bytes < 2 * bits.numel():
            return low
    return WholeBits(bits)


def check_alike(dtype: torch.dtype, numel: int, new: torch.Tensor) -> None:
    """Refuse a tensor of another type or size than at the last sync."""
    if (new.dtype, new.numel()) != (dtype, numel):
        raise UsageError(
            f"a tensor was {dtype} with {numel:,} values at the last sync and is {new.dtype} with "
            f"{new.numel():,} now: begin again with another Sync."
        )


def _low(bits: torch.Tensor) -> torch.Tensor:
    """Return the lower byte of each value."""
    return bits.contiguous().view(torch.uint8)[::2]


def packed(differ: torch.Tensor) -> tuple[Array, int]:
    """Return a mask's bytes, lowest bit first, and the number of bits that are set.

    A mask on a device is packed there, so that only one bit per value is copied.
    """
    if differ.device.type == "cpu":
        flags = differ.numpy()
        return np.packbits(flags, bitorder="little"), int(np.count_nonzero(flags))
    return packed_there(differ)


def packed_there(differ: torch.Tensor) -> tuple[Array, int]:
    """Pack a mask on its own device."""
    padded = torch.nn.functional.pad(differ, (0, -differ.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=differ.device)
    mask = (padded * weights).sum(dim=1, dtype=torch.uint8)
    return mask.cpu().numpy(), int(differ.sum())
