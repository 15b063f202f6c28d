"""Read and write the coordinates of chosen tiles, in a whole tensor or in a shard that begins anywhere in it.

``tiles`` are always numbers of tiles of the whole tensor. A shard may begin and end within a tile.
"""

from __future__ import annotations

import torch

from halfulp.kernels import TILE


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
