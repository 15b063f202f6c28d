"""Estimate the updates, operations and bytes of a training run, to plan a study before it costs anything.

The operations of an update are those of its matrix products, forward and backward: six per weight and token
for the matrices, and twelve times width and context per layer and token for attention. A checkpoint holds the
weights and both moments in float32, and the masters if there are any; its flags and counts are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from halfulp.paper.arms.arm import Arm
from halfulp.paper.models.decoder import Decoder, DecoderConfig, inventory

Json = Any

RTX_5090 = 304.6
"""Seconds that the paper prints for 1000 updates of GPT-2 124M, nearest write-back (tab:gpt2-pareto)."""


@dataclass(frozen=True)
class Effort:
    """Updates of a cell, operations of all of them, and the bytes of its checkpoint."""

    updates: int = 0
    operations: float = 0.0
    checkpoint: int = 0

    def __add__(self, other: Effort) -> Effort:
        most = max(self.checkpoint, other.checkpoint)
        return Effort(self.updates + other.updates, self.operations + other.operations, most)


def effort(config: Mapping[str, Json]) -> Effort:
    """Return what a cell of a decoder study takes; of any other cell, nothing."""
    if "model" in config and "recipe" in config:
        return _of_arm(Arm.from_json(config))
    if "arms" in config:  # processes that are timed, one after the other
        updates = config["updates"] + config["warm"]
        runs = (_shortened(Arm.from_json(config["arms"][name]), updates) for name in config["order"])
        return sum(map(_of_arm, runs), Effort())
    return effort(config["arm"]) if "arm" in config and "update" not in config else Effort()


def _shortened(arm: Arm, updates: int) -> Arm:
    return replace(arm, recipe=replace(arm.recipe, updates=updates))


def _of_arm(arm: Arm) -> Effort:
    recipe, model = arm.recipe, arm.model
    weights, matrices = _counts(model)
    tokens = recipe.batch * recipe.context
    each = 6 * matrices + 12 * model.layers * model.width * recipe.context
    kept = 4 * weights * (4 if "master" in (arm.policy or "") else 3)
    return Effort(recipe.updates, float(recipe.updates) * tokens * each, kept)


@cache
def _counts(model: DecoderConfig) -> tuple[int, int]:
    """Return the number of all weights, and of those that a token is multiplied with."""
    weights = inventory(Decoder(model, device="meta"))
    return weights.parameters, weights.core + model.width * model.vocabulary
