"""Masks of a study: chosen from an arm's scores, sealed as files beside a record, read by later arms.

A recipe for a mask is data: ``{"score": "P", "share": 0.1}`` takes the first tiles by a score;
``{"of": "P", "shuffle": 3}`` is a control, as many tiles of every tensor as mask ``P``, at random places;
``{"score": "R", "rehearsal": 0, "share": 0.1}`` goes by what the first attributed rehearsal's tiles cost, and
``"keep"`` in it names a stage, a cell and a mask whose tiles come first: the second round.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from safetensors.torch import load as load_tensors

from halfulp.arms.arm import Arm
from halfulp.kernels import SCORES
from halfulp.masks import REHEARSED, Mask, choose, tile_sizes
from halfulp.study import Running
from halfulp.writeback import TileMaster

Json = Any
Recipes = Mapping[str, Mapping[str, Json]]


def recipes(share: float, *scores: str, controls: int = 0) -> dict[str, dict[str, Json]]:
    """Masks by scores, named after them, and ``control-1``, ``control-2`` ... of the first."""
    made: dict[str, dict[str, Json]] = {score: {"score": score, "share": share} for score in scores}
    return made | {f"control-{i + 1}": {"of": scores[0], "shuffle": i} for i in range(controls)}


def masters(whose: str, *names: str) -> dict[str, dict[str, Json]]:
    """Arms with masters where masks of the ``source`` or the ``target`` say, named ``source-P`` and so on."""
    return {
        name if name.startswith("control") else f"{whose}-{name}": {
            "policy": TileMaster.name,
            "mask": (whose, name),
        }
        for name in names
    }


def make_masks(running: Running) -> dict[str, Json]:
    """Choose masks by the scores of an arm; they are attached, their sizes and budget are the record.

    The config names the arm's ``stage`` and ``cell``, its ``tile`` and the ``masks``; ``beside``, if there,
    another stage and cell whose masks of the same names are compared with these: the share of tiles that
    both chose.
    """
    config = running.config
    stage, cell = config["stage"], config["cell"]
    sizes = running.read(stage, cell)["sizes"]

    @cache
    def sums() -> dict[str, torch.Tensor]:
        return load_tensors(running.read_bytes(stage, cell, "scores.safetensors"))

    @cache
    def attributed() -> dict[str, torch.Tensor]:
        return load_tensors(running.read_bytes(stage, cell, "attribution.safetensors"))

    made: dict[str, Mask] = {}
    for name, recipe in config["masks"].items():
        if "of" in recipe:
            made[name] = made[recipe["of"]].shuffled(recipe["shuffle"])
            continue
        if recipe["score"] == REHEARSED:
            found = {n: attributed()[f"{recipe['rehearsal']}.{n}"] for n in sizes}
        else:
            found = {n: sums()[n][:, SCORES.index(recipe["score"])] for n in sizes}
        means = {n: found[n].numpy() / tile_sizes(size, config["tile"]) for n, size in sizes.items()}
        keep = read_named(running, recipe["keep"]) if "keep" in recipe else None
        made[name] = choose(means, sizes, recipe["share"], recipe["score"], tile=config["tile"], keep=keep)
    for name, mask in made.items():
        running.attach(f"{name}.safetensors", mask.to_bytes())
    record: dict[str, Json] = {
        "budget": {name: mask.budget for name, mask in made.items()},
        "tiles": {name: {n: int(t.sum()) for n, t in mask.tiles.items()} for name, mask in made.items()},
    }
    if "beside" in config:
        stage, cell = config["beside"]
        record["shared"] = {
            name: read_named(running, {"stage": stage, "cell": cell, "name": name}).overlap(mask)
            for name, mask in made.items()
        }
    return record


def read_mask(running: Running, arm: Arm) -> Mask:
    """The mask that an arm's masters follow."""
    assert arm.mask is not None
    return read_named(running, arm.mask)


def read_named(running: Running, where: Mapping[str, str]) -> Mask:
    """A mask by the stage and the cell that attached it, and its name."""
    stage, cell, file = where["stage"], where["cell"], f"{where['name']}.safetensors"
    return Mask.from_bytes(running.read_bytes(stage, cell, file), f"{stage}/{cell}/{file}")
