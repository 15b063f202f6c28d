"""Hold, save and load masks: the tiles of a model's tensors that get an fp32 master."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import files, tensors
from halfulp.documents import Fields, parsed
from halfulp.errors import CorruptionError, TamperingError, UsageError, VersionError
from halfulp.kernels import TILE, tiles_of
from halfulp.numbers.streams import Stream
from halfulp.writeback.policies import TileMaster

Array = npt.NDArray[Any]

FORMAT, READ = 2, (1, 2)
KEY = "halfulp.mask"
MASTER_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The tiles chosen in each tensor; pass it to :class:`~halfulp.TileMaster` or :meth:`policy`.

    Args:
        tiles: One boolean per tile, by tensor name.
        sizes: The number of coordinates of each tensor.
        score: The score that ranked the tiles.
        budget: The number of bytes that could be spent.
        tile: The number of consecutive coordinates per tile.

    >>> mask = Mask(tiles={"w": torch.tensor([True, False])}, sizes={"w": 1000}, score="P", budget=4000)
    >>> mask.payload_bytes, mask.blanket_bytes
    (3072, 4000)

    It is saved, loaded, and given to a write-back as its policy; a shuffled mask is its control:

    >>> import tempfile
    >>> file = tempfile.mkdtemp() + "/mask.safetensors"
    >>> mask.save(file)
    >>> Mask.load(file).payload("w"), Mask.load(file).overlap(mask)
    (3072, 1.0)
    >>> mask.policy().spec, mask.shuffled(seed=1).payload_bytes
    ('tile-master(start_from=code)', 3072)
    """

    tiles: dict[str, torch.Tensor]
    sizes: dict[str, int]
    score: str
    budget: int
    tile: int = TILE

    def payload(self, name: str) -> int:
        """Return the bytes of masters for one tensor, counting a short last tile exactly.

        Args:
            name: The name of the tensor.
        """
        if name not in self.tiles:
            raise UsageError(f"this mask has no tensor {name!r:.60}, only {self._names()}.")
        chosen = self.tiles[name]
        return MASTER_BYTES * int(tile_sizes(self.sizes[name], self.tile)[chosen.numpy()].sum())

    @property
    def payload_bytes(self) -> int:
        """The exact number of bytes that the masters take."""
        return sum(self.payload(name) for name in self.tiles)

    @property
    def blanket_bytes(self) -> int:
        """The number of bytes that masters for every tile would take."""
        return MASTER_BYTES * sum(self.sizes.values())

    def shuffled(self, seed: int) -> Mask:
        """Return a control with the same payload: as many tiles in every tensor, at random places.

        A short last tile keeps its choice, so every tensor takes the same number of bytes.

        Args:
            seed: The seed of the permutation.

        Returns:
            The shuffled mask.
        """
        tiles = {
            name: torch.from_numpy(_shuffled(chosen.numpy(), self.sizes[name] // self.tile, name, seed))
            for name, chosen in self.tiles.items()
        }
        return replace(self, tiles=tiles, score=f"{self.score} shuffled")

    def overlap(self, other: Mask) -> float:
        """Return the share of these tiles that another mask also chose.

        Args:
            other: A mask of the same tensors.

        Returns:
            A number between 0 and 1.
        """
        given: Any = other  # whatever a caller gave
        if not isinstance(given, Mask) or not self.tiles.keys() <= given.tiles.keys():
            raise UsageError(f"overlap() compares with a mask of the same tensors, {self._names()}.")
        both = sum(int((chosen & other.tiles[name]).sum()) for name, chosen in self.tiles.items())
        return both / sum(int(chosen.sum()) for chosen in self.tiles.values())

    def _names(self) -> str:
        return ", ".join(map(repr, list(self.tiles)[:3])) + (", ..." if len(self.tiles) > 3 else "")

    def policy(self, **options: Any) -> TileMaster:
        """Return the write-back policy that keeps masters for these tiles.

        Args:
            **options: Further options of :class:`~halfulp.TileMaster`.
        """
        return TileMaster(self.tiles, tile=self.tile, **options)

    def save(self, path: str | Path) -> None:
        """Save the mask atomically as one safetensors file with a digest.

        Args:
            path: The file to write.

        Raises:
            UsageError: If the mask is inconsistent.
        """
        files.put(files.path_of(path, "a mask"), self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the file that :meth:`save` writes."""
        wrong = _unfit(self)
        if wrong:
            raise UsageError(f"this mask cannot be saved: {wrong}.")
        metadata = {
            "format": FORMAT, "score": self.score, "budget": self.budget, "sizes": self.sizes,
            "tile": self.tile,
        }  # fmt: skip
        return b"".join(tensors.content(self.tiles, {KEY: json.dumps(metadata)}))

    @classmethod
    def load(cls, path: str | Path) -> Mask:
        """Load a saved mask.

        Args:
            path: A file that :meth:`save` wrote.

        Returns:
            The mask.

        Raises:
            CorruptionError: If the file is not a mask, or is damaged.
            TamperingError: If its content does not match its digest, or the digest was removed or added.
            VersionError: If its format is unknown to this version.
        """
        return cls._read(*tensors.read(files.path_of(path, "a mask"), follow=True), path)

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Mask:
        """Read the content that :meth:`to_bytes` returned; errors name ``where`` as the source."""
        return cls._read(*tensors.read_stream(BytesIO(content), len(content), Path(where)), where)

    @classmethod
    def _read(cls, tiles: dict[str, torch.Tensor], metadata: Mapping[str, str], path: str | Path) -> Mask:
        if KEY not in metadata:
            raise CorruptionError(f"{path} is a safetensors file, but not a mask of halfulp's.")
        fields = Fields(parsed(metadata[KEY], path, "a mask of halfulp's"), str(path))
        version = fields.values.get("format")
        if type(version) is not int or version not in READ:
            raise VersionError(
                f"{path} is a mask of format {version!r}; this halfulp reads {' and '.join(map(str, READ))}."
            )
        if (tensors.DIGEST in metadata) != (version >= 2):
            raise TamperingError(f"{path} is a mask of format {version}: its digest was removed or added.")
        sizes = fields.within("sizes")
        mask = cls(
            tiles=tiles,
            sizes={name: sizes.whole(name) for name in sizes.values},
            score=fields.text("score", 200),
            budget=fields.whole("budget"),
            tile=TILE if version == 1 else fields.whole("tile", 1),
        )
        wrong = _unfit(mask)
        if wrong:
            raise CorruptionError(f"{path} is not a whole mask: {wrong}.")
        return mask


def _unfit(mask: Mask) -> str | None:
    """Return what is wrong with a mask, or None."""
    if set(mask.sizes) != set(mask.tiles):
        return f"it has tiles of {sorted(mask.tiles)} and sizes of {sorted(mask.sizes)}"
    for name, t in mask.tiles.items():
        expected = tiles_of(mask.sizes[name], mask.tile)
        if t.dtype != torch.bool or t.dim() != 1 or len(t) != expected:
            return (
                f"{name!r} of {mask.sizes[name]:,} coordinates has {tuple(t.shape)} of {t.dtype}, expected "
                f"{expected} booleans"
            )
    if mask.payload_bytes > mask.budget:
        return f"its tiles take {mask.payload_bytes:,} bytes, which is above its budget of {mask.budget:,}"
    return None


def tile_sizes(numel: int, tile: int = TILE) -> Array:
    """Return the number of coordinates of each tile of a tensor.

    >>> tile_sizes(1000).tolist(), tile_sizes(200, tile=96).tolist()
    ([768, 232], [96, 96, 8])
    """
    sizes = np.full(tiles_of(numel, tile), tile)
    if numel % tile:
        sizes[-1] = numel % tile
    return sizes


def _shuffled(chosen: Array, whole: int, name: str, seed: int) -> Array:
    order = np.argsort(Stream(seed=seed, name=name, step=0).words(whole), kind="stable")
    return np.concatenate([chosen[:whole][order], chosen[whole:]])
