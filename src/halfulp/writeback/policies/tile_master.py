"""Implement ``tile-master``: fp32 masters for the tiles that a mask chooses.

Tiles are numbered in the whole tensor, also where only a shard of it is at hand, which may begin and end
within a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import TILE, Written
from halfulp.numbers.grids import Grid
from halfulp.writeback.policies.master import UNROUNDED, mended, unrounded
from halfulp.writeback.policies.policy import Kernel, Policy, State, Step


@dataclass(frozen=True)
class TileMaster(Policy):
    """Packed fp32 master weights for chosen tiles; nearest rounding for the others.

    Args:
        mask: A mask from :func:`halfulp.allocate`, or a dictionary of boolean tensors by tensor name, with
            one entry per tile.
        start_from: Start masters from the projected ``code``, or from the ``raw`` value before projection.
        tile: The number of consecutive coordinates per tile. A mask from :func:`halfulp.allocate` carries
            its own; set it to the model's width to make each row of an embedding one tile.
        shard: The offset of a shard in its tensor, and the size of that tensor; set by the write-back.

    Raises:
        UsageError: If ``mask`` is not a mask, or has tiles of another size.

    >>> import halfulp as hu
    >>> model = torch.nn.Linear(96, 16)
    >>> policy = TileMaster({"weight": torch.tensor([True, False])})
    >>> adamw = torch.optim.AdamW(model.parameters())
    >>> opt = hu.WriteBack(adamw, "e4m3@128", policy, model=model)
    >>> opt.slots[0].state["master"].numel()
    768
    """

    name: ClassVar[str] = "tile-master"
    words: ClassVar[str] = "fp32 masters for chosen tiles"
    kernel: ClassVar[Kernel | None] = Kernel(keeps="master", partial=True)
    fixed: ClassVar[tuple[str, ...]] = ("tiles",)
    mask: dict[str, torch.Tensor] = field(default_factory=dict)
    start_from: Literal["code", "raw"] = "code"
    tile: int = TILE
    shard: tuple[int, int] | None = None
    """The offset of a shard in its tensor, and the size of that tensor; set by the write-back."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # equal to itself alone: masks are tensors

    def __post_init__(self) -> None:
        super().__post_init__()
        mask: Any = self.mask
        if hasattr(mask, "tiles") and hasattr(mask, "tile"):  # one of halfulp.allocation.masks
            if self.tile not in (TILE, mask.tile):
                raise UsageError(f"the mask has tiles of {mask.tile} weights, not of {self.tile} (tile=).")
            object.__setattr__(self, "mask", mask.tiles)
            object.__setattr__(self, "tile", mask.tile)
        elif not isinstance(mask, Mapping):
            raise UsageError(
                "TileMaster takes a mask (halfulp.allocate, Mask.load), or by tensor name one boolean per "
                f"tile, not {type(mask).__name__}."
            )
        kernels.checked_tile(self.tile)

    @property
    def offset(self) -> int | None:
        """Return the offset of this rank's part, None for a whole tensor."""
        return None if self.shard is None else self.shard[0]

    def chosen(self, name: str, numel: int) -> torch.Tensor:
        """Return the chosen tiles of a tensor, as sorted indices.

        Args:
            name: The name of the tensor.
            numel: Its number of coordinates.

        Raises:
            UsageError: If the mask has no entry for the tensor, or one of another size.
        """
        if name not in self.mask:
            raise UsageError(
                f"the mask has no entry for {name!r}: it was made for another model. It knows "
                f"{', '.join(list(self.mask)[:5]) or 'nothing'}{' ...' if len(self.mask) > 5 else ''}."
            )
        mask, expected = self.mask[name], kernels.tiles_of(numel, self.tile)
        if mask.dtype != torch.bool or mask.numel() != expected:
            raise UsageError(
                f"the mask of {name!r} must be {expected} booleans (tiles of {self.tile} for {numel} "
                f"weights), but it is {mask.numel()} of {mask.dtype}: it was made for another model, "
                "or for tiles of another size (tile=)."
            )
        return mask.reshape(-1).nonzero().reshape(-1)

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        """Begin with a float32 copy of the chosen tiles."""
        source = (projected if self.start_from == "code" else raw).detach()
        numel = source.numel() if self.shard is None else self.shard[1]
        tiles = self.chosen(name, numel)
        size = int((numel - tiles * self.tile).clamp(max=self.tile).sum())
        tiles = tiles.to(source.device, torch.int32)
        return {"master": take_tiles(source, tiles, size, self.tile, self.offset), "tiles": tiles}

    def resync(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        """Replace masters that no longer round to the stored weights."""
        whole = q.clone(memory_format=torch.contiguous_format)  # a scale may be of more than a tile
        self.spread(whole, state)
        self.collect(mended(whole, q, grid), state)

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        """Show the optimizer the masters of the chosen tiles."""
        self.spread(p, state)

    def after(self, step: Step) -> Written:
        """Keep the finite masters and store everything rounded to nearest."""
        master = step.state["master"]
        moved = self._taken(step.z, step.state)
        step.state["master"] = torch.where(torch.isfinite(moved), moved, master)
        return step.write()

    def spread(self, whole: torch.Tensor, state: State) -> None:
        """Write the masters over the chosen tiles of ``whole``."""
        put_tiles(whole, state["tiles"], state["master"], self.tile, self.offset)

    def collect(self, whole: torch.Tensor, state: State) -> None:
        """Take the chosen tiles of ``whole`` as masters."""
        state["master"].copy_(self._taken(whole, state))

    def _taken(self, whole: torch.Tensor, state: State) -> torch.Tensor:
        return take_tiles(whole, state["tiles"], state["master"].numel(), self.tile, self.offset)

    def on_shard(self, offset: int, numel: int) -> TileMaster:
        """Return this policy for a part of a tensor."""
        return replace(self, shard=(offset, numel))

    def misfits(self, q: torch.Tensor, state: State, grid: Grid) -> tuple[torch.Tensor, str] | None:
        """Return where a master does not round to the stored weight, and why."""
        stored = self._taken(q, state)
        return unrounded(state["master"], stored, grid, raw=self.start_from == "raw"), UNROUNDED

    def to_shards(self, state: State, like: torch.Tensor) -> State:
        """Return the masters in the shape of the shard, zeros elsewhere; packed ones do not shard."""
        whole = torch.zeros(like.shape, dtype=state["master"].dtype, device=state["master"].device)
        self.spread(whole, state)
        return {**state, "master": whole}

    def from_shards(self, key: str, value: torch.Tensor, state: State) -> torch.Tensor:
        """Take the chosen tiles of a whole tensor's state."""
        return take_tiles(value, state["tiles"], 0, self.tile, self.offset) if key == "master" else value

    @property
    def spec(self) -> str:
        """Return the policy as text."""
        size = "" if self.tile == TILE else f",tile={self.tile}"
        return f"tile-master(start_from={self.start_from}{size})"


def _parts(
    flat: torch.Tensor, tiles: torch.Tensor, size: int, tile: int, offset: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut the chosen coordinates of a shard into a first part, whole tiles and a last part.

    Returns what is chosen of a tile that began before the shard, its whole tiles as rows, which of those are
    chosen, and what is chosen of a tile that goes on behind it. All are views.
    Of a whole tensor ``size``, the number of chosen coordinates, tells it without looking at the device.
    """
    head = min(-(offset or 0) % tile, flat.numel())
    count = (flat.numel() - head) // tile
    before, behind = flat[:head], flat[head + count * tile :]
    rows = flat[head : head + count * tile].view(-1, tile)
    if offset is None:
        return before, rows, tiles[: size // tile].long(), flat[flat.numel() - size % tile :]
    first = (offset + head) // tile
    here = tiles[(tiles >= first) & (tiles < first + count)].long() - first
    if not bool((tiles == offset // tile).any()):
        before = before[:0]
    if not bool((tiles == first + count).any()):
        behind = behind[:0]
    return before, rows, here, behind


def take_tiles(
    x: torch.Tensor, tiles: torch.Tensor, size: int, tile: int = TILE, offset: int | None = None
) -> torch.Tensor:
    """Return the coordinates of chosen tiles, in order; the last tile of a tensor may be short.

    Args:
        x: The tensor, or a shard of it.
        tiles: The numbers of the chosen tiles in the whole tensor, in order.
        size: How many coordinates they have; not looked at for a shard.
        tile: Coordinates of a tile.
        offset: Where a shard begins; None for a whole tensor.
    """
    before, rows, here, behind = _parts(x.reshape(-1), tiles, size, tile, offset)
    return torch.cat([before, rows[here].view(-1), behind])


def put_tiles(
    x: torch.Tensor, tiles: torch.Tensor, values: torch.Tensor, tile: int = TILE, offset: int | None = None
) -> None:
    """Write back the values that :func:`take_tiles` returned, in place."""
    flat = x.reshape(-1)
    before, rows, here, behind = _parts(flat, tiles, values.numel(), tile, offset)
    end = values.numel() - behind.numel()
    before.copy_(values[: before.numel()])
    rows.index_copy_(0, here, values[before.numel() : end].view(-1, tile))
    behind.copy_(values[end:])
    if not x.is_contiguous():
        x.copy_(flat.view(x.shape))
