"""Define ``Sync``, which finds exactly the stored values that changed since the last sync, to send them.

Reinforcement learning trains one copy of a model and samples from another, and at small learning rates most
weights that are stored in bf16 or fp8 do not change between two syncs. The optimizer's state cannot tell
which ones do (predictions miss most of them), but the stored bits can. ``Sync`` keeps the bits of the last
sync and compares: a value changed if and only if its bits did, so a zero that changed its sign counts as
changed.

    trainer:  change = sync.take();  change.save("17.safetensors")
    sampler:  receiver.apply(Change.load("17.safetensors"))

With ``grid=``, the trainer's weights are rounded to a grid, and the other side stores its codes and the
scales of its blocks (``nvfp4``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import deprecation
from halfulp.checkpoints.sync import places
from halfulp.checkpoints.sync.block_fp8 import BlockFp8
from halfulp.checkpoints.sync.changes import Change, Part
from halfulp.checkpoints.sync.receiving import as_bits, checksum, position
from halfulp.checkpoints.sync.shards import Box, Model, is_sharded, owned, tied_names
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named_grid
from halfulp.text import shown

Array = npt.NDArray[Any]
SCALES = ".scales"
"""The suffix that names a tensor's scales, for grids that have them."""
COMPARED = 2**20
"""Values that are compared at a time, so that memory does not grow with a tensor."""


class Sync:
    """A tracker of the changes in the stored values of a model, or of tensors by name.

    With a distributed model (``DTensor``) every rank has a ``Sync`` for the shards that it is responsible
    for, and :func:`~halfulp.checkpoints.join` combines the changes of all ranks.

    Args:
        held: The model, or the tensors.
        grid: The format that the other side stores. None: the tensors as they are. A grid: float tensors of
            two or more dimensions as codes of the grid (the scales of its blocks separately).
            :class:`~halfulp.checkpoints.BlockFp8`: fp8 with scales of 128 x 128 blocks.
        bound: Ignored: every bit of the last sync is kept.

    Raises:
        UsageError: If there is nothing to follow, or ``grid`` is invalid.

    >>> weights = {"w": torch.ones(4, dtype=torch.bfloat16)}
    >>> sync = Sync(weights)
    >>> weights["w"][2] += 0.01
    >>> change = sync.take()
    >>> change.parts["w"].indices, change.parts["w"].values
    (tensor([2]), tensor([1.0078], dtype=torch.bfloat16))
    >>> sync.density()
    0.0
    >>> sync.full().parts["w"].values.shape, sync.kept_bytes
    (torch.Size([4]), 8)

    With a grid, what is compared and sent are codes:

    >>> Sync({"w": torch.ones(1, 4)}, "e4m3").stored()["w"]
    tensor([[56, 56, 56, 56]], dtype=torch.uint8)
    """

    def __init__(
        self,
        held: Model,
        grid: str | Grid | torch.dtype | BlockFp8 | None = None,
        *,
        bound: float | None = None,
    ) -> None:
        if bound is not None:
            deprecation.warn("Sync(bound=...)", "Sync(...), which keeps every bit")
        self.held = held
        self.grid = grid if grid is None or isinstance(grid, BlockFp8) else named_grid(grid)
        if isinstance(self.grid, Grid) and self.grid.bits > 16:
            raise UsageError(f"grid {self.grid.name} has {self.grid.bits} bits; codes have at most 16.")
        self.number = 1
        """The number of syncs so far; the first is the initial state of the model."""
        now, _ = self._stored()
        values = held.parameters() if isinstance(held, torch.nn.Module) else held.values()
        if not now and not any(is_sharded(x) for x in values):
            raise UsageError("nothing to follow: there is no tensor with values.")
        self._last = {name: as_bits(x).clone() for name, x in now.items()}
        self._checksums = {name: checksum(bits) for name, bits in self._last.items()}
        self.position = position(1, None, self._checksums)
        """The position of the last sync, to pass to the :class:`~halfulp.Receiver` of a copy made then."""

    @property
    def kept_bytes(self) -> int:
        """The number of bytes kept of the last sync."""
        return sum(bits.nbytes for bits in self._last.values())

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the current stored tensors, or their codes and scales on the grid, by name."""
        return self._stored()[0]

    def _stored(self) -> tuple[dict[str, torch.Tensor], dict[str, Box]]:
        """Return the current stored tensors, and the boxes of those that are shards."""
        tensors, boxes = owned(self.held)
        if self.grid is None:
            return tensors, boxes
        stored: dict[str, torch.Tensor] = {}
        for name, x in tensors.items():
            codes, scales, box = self._coded(name, x, boxes.get(name))
            stored[name] = codes
            if scales is None:
                continue
            other = self._scales_name(name)
            if other in tensors:
                raise UsageError(
                    f"{shown(other)!r} is a tensor of its own, and what the scales of {shown(name)!r} are "
                    "called: give it another name."
                )
            stored[other] = scales
            if box is not None:
                boxes[other] = box
        return stored, boxes

    def _coded(
        self, name: str, x: torch.Tensor, box: Box | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Box | None]:
        """Return the codes and scales of a tensor and a shard's box of scales, or the tensor itself."""
        if isinstance(self.grid, BlockFp8):
            if not self.grid.takes(name, x):
                return x, None, None
            of_scales = None if box is None else box.in_blocks(self.grid.block)
            if box is not None and of_scales is None:
                raise UsageError(
                    f"the shard of {shown(name)!r} that begins at {box.start} cuts a block in "
                    f"two: shard by multiples of {self.grid.block} rows, or leave it out."
                )
            return *self.grid.quantize(name, x), of_scales
        assert self.grid is not None
        if not x.is_floating_point() or x.dim() < 2:
            return x, None, None
        if self.grid.scaling is not None and box is not None:
            raise UsageError(
                f"{shown(name)!r} is sharded, and {self.grid.name} takes scales from values that other ranks "
                "may hold: take a grid with a fixed scale, or BlockFp8()."
            )
        scales = self.grid.scales(x) if self.grid.scaling is not None else None
        codes = self.grid.encode(x, scale=scales)
        codes = codes if codes.dtype == torch.uint8 else codes.to(torch.int16)
        return codes, None if scales is None else scales.float(), None

    def _scales_name(self, name: str) -> str:
        return name + (self.grid.suffix if isinstance(self.grid, BlockFp8) else SCALES)

    def _now(self) -> tuple[dict[str, torch.Tensor], dict[str, Box]]:
        """Return the current stored tensors; refuse other names than those of the last sync."""
        now, boxes = self._stored()
        changes = [f"{shown(n)!r} is new" for n in now if n not in self._last]
        changes += [f"{shown(n)!r} is missing" for n in self._last if n not in now]
        if changes:
            raise UsageError(
                f"the tensors are not those of the last sync: {', '.join(changes[:5])} ({len(changes)} in "
                "all). Begin again with another Sync."
            )
        return now, boxes

    def density(self) -> float:
        """Return the share of stored values that differ from the last sync, without making a new sync."""
        now, _ = self._now()
        changed = sum(len(at) for n, x in now.items() for at in _differing(n, self._last[n], as_bits(x)))
        return changed / max(1, sum(x.numel() for x in now.values()))

    def take(self) -> Change:
        """Return the change since the last sync, and make the current values the new last sync.

        Raises:
            UsageError: If the tensors are not those of the last sync.
        """
        parts: dict[str, Part] = {}
        sums: dict[str, int] = {}
        now, boxes = self._now()
        for name, x in now.items():
            bits = as_bits(x)
            at = np.concatenate([*_differing(name, self._last[name], bits)])
            if at.size:
                sums[name] = checksum(bits)
                parts[name] = _part(x, bits, at, boxes.get(name), sums[name])
        for name in parts:  # not before all are compared, or some could be lost
            self._last[name].copy_(as_bits(now[name]))
        before, self.number = self.position, self.number + 1
        self.position = position(self.number, before, sums)
        self._checksums |= sums
        return self._change(before, now, boxes, parts)

    def full(self) -> Change:
        """Return all values as of the last sync, for a new copy.

        Raises:
            UsageError: If the tensors are not those of the last sync.
        """
        now, boxes = self._now()
        parts = {
            name: _part(x, self._last[name], None, boxes.get(name), self._checksums[name])
            for name, x in now.items()
        }
        return self._change(None, now, boxes, parts)

    def _change(
        self, base: str | None, now: dict[str, torch.Tensor], boxes: dict[str, Box], parts: dict[str, Part]
    ) -> Change:
        tied = {
            of(name): [of(other) for other in others]
            for name, others in tied_names(self.held).items()
            for of in (str, self._scales_name)
            if of(name) in parts
        }
        numel = sum(x.numel() for x in now.values())
        since = 0 if base is None else self.number - 1
        whole = {name: crc for name, crc in self._checksums.items() if name not in boxes}
        sharded = {name: [(box, self._checksums[name])] for name, box in boxes.items()}
        return Change(since, self.number, numel, parts, tied, base, self.position, whole, sharded)


def _differing(name: str, old: torch.Tensor, new: torch.Tensor) -> Iterator[Array]:
    """Yield the positions at which the bits of a tensor differ, in order, chunk by chunk."""
    if (new.dtype, new.numel()) != (old.dtype, old.numel()):
        raise UsageError(
            f"{shown(name)!r} had {old.numel():,} values of {old.element_size()} bytes at the last sync, and "
            f"has {new.numel():,} of {new.element_size()} now: begin again with another Sync."
        )
    for i, (a, b) in enumerate(zip(torch.split(old, COMPARED), torch.split(new, COMPARED), strict=True)):
        yield (a != b).nonzero()[:, 0].cpu().numpy() + i * COMPARED


def _part(x: torch.Tensor, bits: torch.Tensor, at: Array | None, box: Box | None, crc: int) -> Part:
    """Return the values at these positions (None: all); those of a shard by positions in the whole."""
    values = bits if at is None else bits[torch.from_numpy(at).to(bits.device)]
    values = values.clone() if values.device.type == "cpu" else values.cpu()
    if at is None and box is None:
        return Part(x.dtype, tuple(x.shape), "all", torch.empty(0, dtype=torch.uint8), values, crc)
    at = np.arange(bits.numel()) if at is None else at
    shape = tuple(x.shape) if box is None else box.shape
    form, where = places.smallest(at if box is None else box.flat(at), math.prod(shape))
    return Part(x.dtype, shape, form, torch.from_numpy(where), values, crc if box is None else None)
