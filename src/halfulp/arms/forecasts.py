"""What a float32 reference says of a run on a grid: a cell of a prediction stage."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from halfulp.arms import records
from halfulp.grids import grid as named
from halfulp.measures.crossings import crossing
from halfulp.measures.forecasts import pooled_rho, scalar_rho_map
from halfulp.measures.groups import CORE
from halfulp.study import Running

PREDICTORS = ("frozen", "symmetric", "rho")
"""The exact event; the symmetric half-gap; the pooled scalar through the uniform-phase map."""
REHEARSAL = "rehearsal"
"""The event at the codes of the rehearsed nearest run, where there is one."""
NEAREST = "rne"
AGAIN = "second-reference"
"""The stage in which references run once more, with the masks that they made."""


def forecast(running: Running) -> dict[str, Any]:
    """The frozen fraction of every update on a grid, by scope, as each predictor has it.

    ``stays`` is the share of coordinates that stochastic rounding is expected never to move, at the end.
    """
    config = running.config
    grid, stage, cell = config["grid"], config.get("stage", "reference"), config["reference"]
    record = running.read(stage, cell)
    by_grid, by_group = (
        pl.read_parquet(io.BytesIO(running.read_bytes(stage, cell, f"{name}.parquet")))
        for name in ("grids", "groups")
    )
    by_grid = by_grid.filter(pl.col("grid") == grid)
    counted, expected = (_series(by_grid, name) for name in ("symmetric", "expected"))
    norms = {name: _series(by_group, name) for name in ("proposal_sq", "weight_sq")}

    def rho(scope: str) -> np.ndarray[Any, Any]:
        if scope == records.DENSE:
            return np.asarray(np.mean([rho(group) for group in CORE], axis=0))
        d, w = (
            np.sum([found[g] for g in records.groups_of(record, scope)], axis=0) for found in norms.values()
        )
        return scalar_rho_map(pooled_rho(d, w, named(grid).epsilon))

    rehearsed = config.get("rehearse", {})
    found = {
        scope: {
            "frozen": records.frozen(record, grid, scope),
            "symmetric": records.share(record, counted, scope),
            "rho": rho(scope),
            **({"rehearsal": records.rehearsed(record, grid, scope)} if NEAREST in rehearsed else {}),
        }
        for scope in config["scopes"]
    }
    predictors = (*PREDICTORS, *((REHEARSAL,) if NEAREST in rehearsed else ()))
    series = {p: {scope: each[p].tolist() for scope, each in found.items()} for p in predictors}
    stays = {scope: float(records.share(record, expected, scope)[-1]) for scope in found}
    crossings = {scope: asdict(crossing(each["frozen"])) for scope, each in found.items()}
    losses = _losses(running, record)
    heard = {"losses": losses} if losses else {}
    if len(found) == 1:  # then without the level of scopes
        (scope,) = found
        return {
            "seed": config["seed"],
            "grid": grid,
            **{p: series[p][scope] for p in predictors},
            "stays": stays[scope],
            **crossings[scope],
            **heard,
        }
    return {"seed": config["seed"], "grid": grid, **series, "stays": stays, "crossings": crossings, **heard}


def forecast_losses(running: Running) -> dict[str, Any]:
    """What a reference forecasts of the arms that it rehearses: their losses alone, by update and bound."""
    config = running.config
    record = running.read("reference", config["reference"])
    return {"seed": config["seed"], "grid": config["grid"], "losses": _losses(running, record)}


def _losses(running: Running, record: records.Record) -> dict[str, Any]:
    """Of every rehearsed arm the losses; of those that needed a second reference, from there."""
    config = running.config
    told = [(record, config.get("rehearse", {}))]
    if "again" in config:
        told.append((running.read(AGAIN, config["reference"]), config["again"]))
    return {arm: records.rehearsed_losses(r, spec) for r, specs in told for arm, spec in specs.items()}


def _series(table: pl.DataFrame, column: str) -> dict[str, np.ndarray[Any, Any]]:
    """A column by group, one value an update."""
    parts = table.sort("step").partition_by("group", as_dict=True)
    return {str(group): rows[column].to_numpy() for (group,), rows in parts.items()}
