"""Compute what a float32 reference says of a run on a grid: a cell of a prediction stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from halfulp.measures.crossings import crossing
from halfulp.measures.forecasts import pooled_rho, scalar_rho_map
from halfulp.measures.groups import CORE
from halfulp.numbers.grids import grid as named
from halfulp.paper.arms import records
from halfulp.paper.values import finite
from halfulp.study import Running
from halfulp.trace import Columns

AGAIN = "second-reference"
"""The stage in which references run once more, with the masks that they made."""


def forecast(running: Running) -> dict[str, Any]:
    """Return the frozen fraction of every update on a grid, by scope, as each predictor has it.

    ``frozen`` is the exact event, ``symmetric`` the half-gap, ``rho`` the pooled scalar through the
    uniform-phase map, ``rehearsal`` the event at the codes of the rehearsed nearest run, if there is one;
    ``stays``: what stochastic rounding is expected never to move, at the end; None if not followed (a GPU).
    """
    config = running.config
    grid, stage, cell = config["grid"], config.get("stage", "reference"), config["reference"]
    record = running.read(stage, cell)
    by_grid, by_group = (
        records.unpack(
            running.read_bytes(stage, cell, f"{name}.safetensors"), f"{stage}/{cell}/{name}.safetensors"
        )
        for name in ("grids", "groups")
    )
    by_grid = by_grid.take(by_grid["grid"] == grid)
    counted, expected = (_series(by_grid, name) for name in ("symmetric", "expected"))
    norms = {name: _series(by_group, name) for name in ("proposal_sq", "weight_sq")}

    def rho(scope: str) -> np.ndarray[Any, Any]:
        if scope == records.DENSE:
            return np.asarray(np.mean([rho(group) for group in CORE], axis=0))
        d, w = (
            np.sum([sums[g] for g in records.groups_of(record, scope)], axis=0) for sums in norms.values()
        )
        return scalar_rho_map(pooled_rho(d, w, named(grid).epsilon))

    by_scope: dict[str, Callable[[str], Any]] = {
        "frozen": lambda scope: records.frozen(record, grid, scope).tolist(),
        "symmetric": lambda scope: records.share(record, counted, scope).tolist(),
        "rho": lambda scope: rho(scope).tolist(),
        "stays": lambda scope: finite(float(records.share(record, expected, scope)[-1])),
        "crossings": lambda scope: asdict(crossing(records.frozen(record, grid, scope))),
    }
    if "rne" in config.get("rehearse", {}):
        by_scope["rehearsal"] = lambda scope: records.frozen(record, grid, scope, "rehearsed").tolist()
    by_predictor = {name: {scope: of(scope) for scope in config["scopes"]} for name, of in by_scope.items()}
    if len(config["scopes"]) == 1:  # then without the level of scopes
        by_predictor = {name: each[config["scopes"][0]] for name, each in by_predictor.items()}
        by_predictor |= by_predictor.pop("crossings")
    return {**forecast_losses(running), **by_predictor}


def forecast_losses(running: Running) -> dict[str, Any]:
    """Return a reference's forecasts of the arms that it rehearses: their losses, by update and bound."""
    config = running.config
    said = [(running.read(config.get("stage", "reference"), config["reference"]), config.get("rehearse", {}))]
    if "again" in config:
        said.append((running.read(AGAIN, config["reference"]), config["again"]))
    losses = {arm: records.rehearsed_losses(r, spec) for r, specs in said for arm, spec in specs.items()}
    return {"seed": config["seed"], "grid": config["grid"], **({"losses": losses} if losses else {})}


def _series(table: Columns, column: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return a column by group, one value per update."""
    table = table.sort("step")
    return {str(g): table[column][table["group"] == g] for g in dict.fromkeys(table["group"].tolist())}
