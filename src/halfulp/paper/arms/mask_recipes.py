"""Masks of a study: chosen from an arm's scores, sealed as files beside a record, read by later arms.

A recipe for a mask is data:

``{"score": "P", "share": 0.1}``
    the first tiles by a score; with ``"nest": "P5"``, those of an earlier mask first.
``{"of": "P", "shuffle": 3}``
    a control: as many tiles of every tensor as mask ``P``, at random places.
``{"random": 3, "share": 0.1}``
    random tiles, of all tensors or of one (``"within": NAME``).
``{"whole": True, "share": 0.25}``
    whole tensors, by the share of their coordinates that no update of the window would move, until they are
    at least that share of all; ``"anti"`` from the other end, ``"without"`` names a tensor that is not
    taken, ``"draw": 3`` takes them in random order until they are as many as ``"like"``, another mask, has.
``{"only": NAME}``
    all of one tensor.
``{"score": "R", "rehearsal": 0, "share": 0.1}``
    by what the first attributed rehearsal's tiles cost.

A run makes them of its own sums when it ends (``Arm.make``) and keeps ``masks.safetensors``, a bit a tile.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp import tensors
from halfulp.allocation.masks import REHEARSED, Mask, choose, drawn, tile_sizes, whole_tensors
from halfulp.documents import whole
from halfulp.errors import CorruptionError
from halfulp.kernels import SCORES, tiles_of
from halfulp.measures.events import symmetric_frozen
from halfulp.numbers.streams import Stream
from halfulp.study import Running
from halfulp.text import shown
from halfulp.writeback import TileMaster

Json = Any
Recipes = Mapping[str, Mapping[str, Json]]
PACKED = "masks.safetensors"
_KEY = "halfulp.arms.masks"  # in files
_KEPT = "silent."


def recipes(share: float, *scores: str, controls: int = 0) -> dict[str, dict[str, Json]]:
    """Return recipes of masks by scores, named after them, and of shuffled controls of the first."""
    wanted: dict[str, dict[str, Json]] = {score: {"score": score, "share": share} for score in scores}
    return wanted | {f"control-{i + 1}": {"of": scores[0], "shuffle": i} for i in range(controls)}


def masters(whose: str, *names: str, **options: Json) -> dict[str, dict[str, Json]]:
    """Arms with masters where masks of the ``source`` or the ``target`` say, named ``source-P`` and so on."""
    return {
        name if name.startswith("control") else f"{whose}-{name}": {
            "policy": TileMaster.name,
            "mask": (whose, name),
            **options,
        }
        for name in names
    }


# ---- making them ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranked:
    """The input of recipes: the tensors' sizes, and sums by tile and by tensor where a run has them."""

    sizes: Mapping[str, int]
    tile: int
    sums: Callable[[], Mapping[str, Any]] = dict
    """The sums of every score, by tensor, one row per tile."""
    attributed: Callable[[int], Mapping[str, Any]] = lambda rehearsal: {}
    """The cost of each tile of an attributed rehearsal, by tensor."""
    silent: Mapping[str, float] = field(default_factory=dict)
    """By tensor: the share of coordinates that every update of the window would have left where they were."""

    def masks(self, wanted: Recipes) -> dict[str, Mask]:
        """Return the masks of some recipes, each after those that it refers to: a protocol keeps no order."""
        masks: dict[str, Mask] = {}

        def make(name: str) -> None:
            if name not in masks:
                for key in ("of", "nest", "like"):
                    if key in wanted[name]:
                        make(wanted[name][key])
                masks[name] = self._mask(wanted[name], masks)

        for name in wanted:
            make(name)
        return {name: masks[name] for name in wanted}

    def _mask(self, recipe: Mapping[str, Json], masks: Mapping[str, Mask]) -> Mask:
        if "of" in recipe:
            return masks[recipe["of"]].shuffled(recipe["shuffle"])
        if "random" in recipe:
            return drawn(self.sizes, recipe["share"], recipe["random"], self.tile, recipe.get("within"))
        if "only" in recipe:
            share = self.sizes[recipe["only"]] / sum(self.sizes.values())
            return whole_tensors({recipe["only"]: 0.0}, self.sizes, share, "one tensor", self.tile)
        if "whole" in recipe:
            return self._whole(recipe, masks)
        if recipe["score"] == REHEARSED:
            scores = self.attributed(recipe["rehearsal"])
        else:
            scores = {n: sums[:, SCORES.index(recipe["score"])] for n, sums in self.sums().items()}
        means = {n: np.asarray(scores[n]) / tile_sizes(size, self.tile) for n, size in self.sizes.items()}
        keep = masks[recipe["nest"]] if "nest" in recipe else None
        return choose(means, self.sizes, recipe["share"], recipe["score"], tile=self.tile, keep=keep)

    def _whole(self, recipe: Mapping[str, Json], masks: Mapping[str, Mask]) -> Mask:
        if "draw" in recipe:
            spent = masks[recipe["like"]].payload_bytes / masks[recipe["like"]].blanket_bytes
            ranks = {n: float(Stream(seed=recipe["draw"], name=n, step=0).words(1)[0]) for n in self.sizes}
            return whole_tensors(ranks, self.sizes, spent, "random tensors", self.tile)
        sign = -1.0 if recipe.get("anti") else 1.0
        ranks = {n: sign * share for n, share in self.silent.items() if n != recipe.get("without")}
        return whole_tensors(ranks, self.sizes, recipe["share"], "whole tensors", self.tile)


def described(
    masks: Mapping[str, Mask], group_of: Mapping[str, str], beside: Mapping[str, Mask] | None = None
) -> dict[str, Json]:
    """Describe masks for a record: budgets, tiles by group, tiles shared with others of the same name."""
    tiles: dict[str, Counter[str]] = {name: Counter() for name in masks}
    for name, mask in masks.items():
        for tensor, chosen in mask.tiles.items():
            tiles[name][group_of[tensor]] += int(chosen.sum())
    said: dict[str, Json] = {"budget": {name: mask.budget for name, mask in masks.items()}, "tiles": tiles}
    if beside is not None:
        said["shared"] = {name: beside[name].overlap(mask) for name, mask in masks.items() if name in beside}
    return said


# ---- silent coordinates -----------------------------------------------------------------------------------


class Silent:
    """Follows which coordinates of some tensors stay *silent* over the first updates of a run.

    A coordinate is silent while every proposal so far was below the symmetric half-gap of its weight
    (:func:`halfulp.measures.events.symmetric_frozen`); the paper's whole-tensor study predates the exact
    event. One flag per coordinate is kept, so it is not among the scores, which are sums.
    """

    def __init__(self, watched: Mapping[str, torch.Tensor], grid: str, last: int) -> None:
        self.watched, self.grid, self.last = watched, grid, last
        self.flags = {n: torch.ones(p.shape, dtype=torch.bool) for n, p in self.watched.items()}

    @contextlib.contextmanager
    def watching(self, update: int) -> Iterator[None]:
        """Note around an update, if it is in the window, which weights are asked to move far enough."""
        before = {n: p.detach().clone() for n, p in self.watched.items()} if update <= self.last else {}
        yield
        for name, w in before.items():
            d = self.watched[name].detach() - w
            self.flags[name] &= symmetric_frozen(w, d, self.grid).cpu()

    @property
    def shares(self) -> dict[str, float]:
        """By tensor, the share of coordinates that were never asked to."""
        return {n: int(flags.sum()) / flags.numel() for n, flags in self.flags.items()}

    def save(self) -> dict[str, torch.Tensor]:
        """Return the flags, as a run keeps them."""
        return {_KEPT + n: flags for n, flags in self.flags.items()}

    def load(self, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take them up again; what else was kept."""
        self.flags = {n: kept[_KEPT + n] for n in self.flags}
        return {k: t for k, t in kept.items() if not k.startswith(_KEPT)}


# ---- keeping and reading them -----------------------------------------------------------------------------


def pack(masks: Mapping[str, Mask]) -> bytes:
    """Pack masks of the same tensors and tiles into one file, a bit per tile; see :func:`unpacked`."""
    first = next(iter(masks.values()))
    bits = {
        name: torch.from_numpy(np.packbits(np.concatenate([t.numpy() for t in mask.tiles.values()])))
        for name, mask in masks.items()
    }
    said = {
        "sizes": list(first.sizes.items()), "tile": first.tile,
        "masks": {name: [mask.score, mask.budget] for name, mask in masks.items()},
    }  # fmt: skip
    return b"".join(tensors.content(bits, {_KEY: json.dumps(said)}))


def unpacked(content: bytes, where: str) -> dict[str, Mask]:
    """Return the masks of a file that :func:`pack` made, by name; ``where`` is named in errors."""
    bits, metadata = tensors.read_stream(BytesIO(content), len(content), Path(where))
    try:
        return _unpacked(bits, json.loads(metadata[_KEY]))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{where} does not hold masks of a run: {shown(repr(error), 120)}.") from None


def _unpacked(bits: Mapping[str, torch.Tensor], said: Json) -> dict[str, Mask]:
    sizes, tile = dict(said["sizes"]), said["tile"]
    if any(not whole(n, 1) for n in (*sizes.values(), tile)):
        raise ValueError("sizes and tile are whole numbers from 1")
    counts = [tiles_of(size, tile) for size in sizes.values()]
    if any((sum(counts) + 7) // 8 != t.numel() or t.dtype != torch.uint8 for t in bits.values()):
        raise ValueError(f"a mask of these sizes has {sum(counts)} bits")
    masks = {}
    for name, (score, budget) in said["masks"].items():
        flags = np.unpackbits(bits[name].numpy(), count=sum(counts)).astype(bool)
        parts = np.split(flags, np.cumsum(counts)[:-1])
        tiles = {n: torch.from_numpy(part.copy()) for n, part in zip(sizes, parts, strict=True)}
        masks[name] = Mask(tiles=tiles, sizes=sizes, score=score, budget=budget, tile=tile)
    return masks


def read_named(running: Running, where: Mapping[str, str]) -> Mask:
    """Return a mask by the stage and the cell of the run that made it, and its name."""
    return read_packed(running, where)[where["name"]]


def read_packed(running: Running, where: Mapping[str, str]) -> dict[str, Mask]:
    """Return all masks that a run packed when it ended; ``evidence`` in its place: of another study."""
    stage, cell = where["stage"], where["cell"]
    if "evidence" in where:
        content = running.evidence(where["evidence"]).attached(stage, cell, PACKED)
    else:
        content = running.read_bytes(stage, cell, PACKED)
    return unpacked(content, f"{stage}/{cell}/{PACKED}")
