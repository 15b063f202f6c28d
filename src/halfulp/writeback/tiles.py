"""The coordinates of chosen tiles, in order: of a whole tensor, or of a shard that begins anywhere in it.

``tiles`` are always numbers of tiles of the whole tensor. A shard may begin and end within a tile.
"""

from __future__ import annotations

import torch

from halfulp.kernels import TILE


def _whole(
    flat: torch.Tensor, tiles: torch.Tensor, size: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole tiles of a flat tensor as rows, and which are chosen: all, or all but the short last one.

    ``size``, the number of coordinates that were chosen, tells which without looking at the device.
    """
    rows = flat[: flat.numel() // tile * tile].view(-1, tile)
    return rows, tiles[: size // tile].long()


def _shard(
    flat: torch.Tensor, tiles: torch.Tensor, tile: int, offset: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a shard: what is chosen of a tile that began before it, its whole tiles as rows, which of those are
    chosen, and what is chosen of a tile that goes on behind it. All are views."""
    head = min(-offset % tile, flat.numel())
    count = (flat.numel() - head) // tile
    first = (offset + head) // tile
    rows = flat[head : head + count * tile].view(-1, tile)
    here = tiles[(tiles >= first) & (tiles < first + count)].long() - first
    before, behind = flat[:head], flat[head + count * tile :]
    if not bool((tiles == offset // tile).any()):
        before = before[:0]
    if not bool((tiles == first + count).any()):
        behind = behind[:0]
    return before, rows, here, behind


def take_tiles(
    x: torch.Tensor, tiles: torch.Tensor, size: int, tile: int = TILE, offset: int | None = None
) -> torch.Tensor:
    """The coordinates of chosen tiles, in order; the last tile of a tensor may be short. ``offset``: where a
    shard begins; ``size``, how many they are, is not asked for there."""
    flat = x.reshape(-1)
    if offset is not None:
        before, rows, here, behind = _shard(flat, tiles, tile, offset)
        return torch.cat([before, rows[here].view(-1), behind])
    rows, whole = _whole(flat, tiles, size, tile)
    return torch.cat([rows[whole].view(-1), flat[flat.numel() - size % tile :]])


def put_tiles(
    x: torch.Tensor, tiles: torch.Tensor, values: torch.Tensor, tile: int = TILE, offset: int | None = None
) -> None:
    """The inverse of :func:`take_tiles`, in place."""
    flat = x.reshape(-1)
    if offset is not None:
        before, rows, here, behind = _shard(flat, tiles, tile, offset)
        middle = values[before.numel() : values.numel() - behind.numel()]
        before.copy_(values[: before.numel()])
        rows.index_copy_(0, here, middle.view(-1, tile))
        behind.copy_(values[values.numel() - behind.numel() :])
    else:
        rows, whole = _whole(flat, tiles, values.numel(), tile)
        rows.index_copy_(0, whole, values[: whole.numel() * tile].view(-1, tile))
        flat[flat.numel() - values.numel() % tile :] = values[whole.numel() * tile :]
    if not x.is_contiguous():
        x.copy_(flat.view(x.shape))
