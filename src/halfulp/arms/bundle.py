"""Targets x conditions x arms: the shape that all decoder studies share.

A *target* is a training seed, a *condition* what a study compares it under (a grid, a schedule), an *arm* a
write-back policy. Target and condition make a *unit*: its runs share initial weights, data and evaluation
contexts. A bundle says which there are and yields the study's stages:

``reference``
    float32 runs, audited for the grids of the conditions: anchors, and what forecasts are made of. One a
    target from its raw weights, or, for ``anchor="projected"``, one a unit from the arms' own first codes.
``forecast``
    what the reference says of the nearest arm, by scope: directional, symmetric and scalar rho; and of every
    arm that it rehearses: the loss, between its bounds; sealed before any outcome.
``source``, ``source-masks``, ``target-masks``
    with masks: a source run's scores, the masks that they give, those of each target's own reference.
``outcome``
    every arm of every unit.

What varies between studies is data; a change of one field is :func:`dataclasses.replace`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from halfulp.arms import masks, records
from halfulp.arms.arm import Arm
from halfulp.arms.corpus import files_of
from halfulp.arms.forecasts import forecast
from halfulp.arms.measures import FP32
from halfulp.arms.run import run
from halfulp.study.protocol import Cell, Config, Estimand, Records, Stage, Values

Json = Any
Changes = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Which masks a study makes, and of whose scores."""

    source: int
    """The seed of the run whose scores choose for all targets."""
    window: float
    """The share of the updates over which scores are summed."""
    of_source: masks.Recipes
    of_target: masks.Recipes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The runs of a decoder study: see the module's docstring."""

    scales: Mapping[str, Arm]
    """What every run shares, by scale."""
    targets: tuple[int, ...]
    conditions: Mapping[str, Changes]
    """By name: what it changes of an arm; its grid, at least."""
    arms: Mapping[str, Changes]
    """By name: what it changes; a policy. ``mask=("source", "P")`` names a mask of the source or target."""
    anchor: Literal["raw", "projected"] = "raw"
    scopes: tuple[str, ...] = ()
    """Scopes that are forecast; none for no forecast."""
    rehearse: tuple[str, ...] = ()
    """Arms that the references rehearse, so that a forecast has their losses."""
    masked: Masked | None = None
    unit: str = "{condition}-{seed}"
    reference: str = "fp32-{seed}"

    # ---- names ----

    @cached_property
    def units(self) -> dict[str, tuple[str, int]]:
        """Condition and target of every unit, by name."""
        return {
            self.unit.format(condition=condition, seed=seed): (condition, seed)
            for condition in self.conditions
            for seed in self.targets
        }

    def reference_of(self, unit: str) -> str:
        """The cell of a unit's anchor."""
        condition, seed = self.units[unit]
        return self.reference.format(condition=condition, seed=seed)

    def cell(self, unit: str, arm: str) -> str:
        """The cell of an arm; where there is one arm, the unit's name says it."""
        return unit if len(self.arms) == 1 else f"{unit}-{arm}"

    def rehearsals(self, condition: str) -> dict[str, str]:
        """What a reference rehearses of a condition, by arm."""
        grid = self.conditions[condition]["grid"]
        policies = {arm: self.arms[arm]["policy"] for arm in self.rehearse}
        return {arm: grid if policy == "rne" else f"{grid}:{policy}" for arm, policy in policies.items()}

    # ---- runs ----

    @property
    def configs(self) -> dict[str, Config]:
        """A study's scales."""
        return {
            scale: {"arm": arm.to_json(), "targets": list(self.targets)} for scale, arm in self.scales.items()
        }

    @property
    def data(self) -> dict[str, tuple[str, ...]]:
        """The data sets that each scale needs."""
        return {scale: files_of(arm.corpus) for scale, arm in self.scales.items()}

    def _run(self, config: Config, seed: int, **changes: Any) -> Arm:
        return replace(Arm.from_json(config["arm"]), seed=seed, **changes)

    def _window(self, config: Config) -> int:
        assert self.masked is not None
        return round(self.masked.window * Arm.from_json(config["arm"]).recipe.updates)

    def references(self, config: Config) -> Iterator[Cell]:
        """A float32 run for every anchor."""
        made: dict[str, Arm] = {}
        for unit, (condition, seed) in self.units.items():
            changes = dict(self.conditions[condition])
            grid, name = changes.pop("grid"), self.reference_of(unit)
            rehearse = tuple(self.rehearsals(condition).values())
            if name in made:  # one raw anchor for several grids
                so_far = made[name]
                made[name] = replace(
                    so_far, audit=(*so_far.audit, grid), rehearse=(*so_far.rehearse, *rehearse)
                )
                continue
            if self.anchor == "projected":
                changes["projected"] = grid
            if self.masked is not None:
                changes["scores"] = (grid, self._window(config))
            made[name] = self._run(config, seed, audit=(grid,), rehearse=rehearse, **changes)
        return (Cell(name=name, config=arm.to_json()) for name, arm in made.items())

    def forecasts(self, config: Config) -> Iterator[Cell]:
        """A forecast for every unit."""
        for unit, (condition, seed) in self.units.items():
            yield Cell(
                name=unit,
                config={
                    "seed": seed, "grid": self.conditions[condition]["grid"],
                    "reference": self.reference_of(unit), "scopes": list(self.scopes),
                    **({"rehearse": self.rehearsals(condition)} if self.rehearse else {}),
                },
            )  # fmt: skip

    def outcomes(self, config: Config) -> Iterator[Cell]:
        """Every arm of every unit."""
        for unit, (condition, seed) in self.units.items():
            for arm, how in self.arms.items():
                changes = {"stream_seed": seed + 1, **self.conditions[condition], **how}
                if "mask" in how:
                    whose, name = how["mask"]
                    cell = whose if whose == "source" else unit
                    changes["mask"] = {"stage": f"{whose}-masks", "cell": cell, "name": name}
                yield Cell(name=self.cell(unit, arm), config=self._run(config, seed, **changes).to_json())

    def source(self, config: Config) -> Iterator[Cell]:
        """The source's float32 run, as long as its scores are summed."""
        assert self.masked is not None
        (condition,) = self.conditions.values()
        window = self._window(config)
        arm = self._run(
            config, self.masked.source, audit=(condition["grid"],), scores=(condition["grid"], window)
        )
        yield Cell(name="source", config=replace(arm, recipe=replace(arm.recipe, updates=window)).to_json())

    def source_masks(self, config: Config) -> Iterator[Cell]:
        """The masks that the source gives."""
        yield self._masks("source", config, stage="source", cell="source")

    def target_masks(self, config: Config) -> Iterator[Cell]:
        """The masks that each target would have given itself."""
        for unit in self.units:
            reference = self.reference_of(unit)
            yield self._masks(
                unit, config, stage="reference", cell=reference, beside=["source-masks", "source"]
            )

    def _masks(self, name: str, config: Config, **where: Json) -> Cell:
        assert self.masked is not None
        recipes = self.masked.of_source if name == "source" else self.masked.of_target
        tile = Arm.from_json(config["arm"]).tile
        return Cell(
            name=name, config={**where, "tile": tile, "masks": {k: dict(v) for k, v in recipes.items()}}
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A study's stages, in order: what is predicted is sealed before any outcome."""
        made, masks_read = [], tuple[str, ...]()
        if self.masked is not None:
            made += [
                Stage(name="source", kind="reference", cells=self.source, run=run),
                Stage(
                    name="source-masks", kind="prediction", cells=self.source_masks, run=masks.make_masks,
                    reads=("source",),
                ),
            ]  # fmt: skip
            masks_read = ("source-masks",)
        made.append(Stage(name="reference", kind="reference", cells=self.references, run=run))
        if self.masked is not None and self.masked.of_target:
            made.append(
                Stage(
                    name="target-masks", kind="prediction", cells=self.target_masks, run=masks.make_masks,
                    reads=("source-masks", "reference"),
                )
            )  # fmt: skip
            masks_read = (*masks_read, "target-masks")
        if self.scopes:
            made.append(
                Stage(
                    name="forecast", kind="prediction", cells=self.forecasts, run=forecast,
                    reads=("reference",),
                )
            )  # fmt: skip
        made.append(Stage(name="outcome", kind="outcome", cells=self.outcomes, run=run, reads=masks_read))
        return tuple(made)

    # ---- records ----

    def over(self, found: Records, condition: str | None = None) -> list[Unit]:
        """The units, or those of a condition, with their records."""
        return [Unit(self, found, u) for u, (c, _) in self.units.items() if condition in (None, c)]

    def each(self, measure: Callable[..., float | None]) -> Callable[..., Values]:
        """What computes a measure of every unit; a protocol shows its name."""

        @functools.wraps(measure)
        def compute(found: Records, **arguments: Any) -> Values:
            return {unit: measure(Unit(self, found, unit), **arguments) for unit in self.units}

        return compute

    def estimand(
        self, name: str, what: str, measure: Callable[..., float | None], **arguments: Any
    ) -> Estimand:
        """A measure of every unit, as an estimand; its arguments are sealed."""
        return Estimand(name=name, what=what, compute=self.each(measure), args=arguments)


@dataclass(frozen=True)
class Unit:
    """One target under one condition: where its records are."""

    bundle: Bundle
    found: Records
    name: str

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.bundle.arms)

    def run(self, arm: str) -> records.Record:
        """The record of an arm, or of the float32 anchor."""
        if arm == FP32:
            return self.found["reference"][self.bundle.reference_of(self.name)]
        return self.found["outcome"][self.bundle.cell(self.name, arm)]

    def forecast(self, scope: str, predictor: str = "frozen") -> records.Array | None:
        """The frozen fraction of every update, as it was forecast; None where that was not recorded."""
        found = self.found["forecast"][self.name].get(predictor)
        found = found[scope] if isinstance(found, Mapping) else found
        return None if found is None else np.asarray(found)

    def forecast_loss(self, arm: str, bound: str, update: int | None = None) -> float | None:
        """The loss of an arm after an update, as its rehearsal has it; the last by default."""
        told = self.found["forecast"][self.name]["losses"][arm]
        at = str(self.run(FP32)["updates"] if update is None else update)
        return told[at][bound] if at in told else None

    @property
    def masks(self) -> records.Record:
        """What was recorded of the target's own masks."""
        return self.found["target-masks"][self.name]

    def budget(self, arm: str) -> int:
        """The bytes that the mask of an arm was to spend."""
        whose, name = self.bundle.arms[arm]["mask"]
        cell = "source" if whose == "source" else self.name
        return int(self.found[f"{whose}-masks"][cell]["budget"][name])
