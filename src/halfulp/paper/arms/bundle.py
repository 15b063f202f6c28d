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
``source``
    with a source: one float32 run of another seed. Forecasts are then made of it alone, before any target
    runs, and the references are *privileged*: each knows its own target.
    With masks, which a run makes of its own scores when it ends: the run whose masks all targets are given.
    Where no source is named every target is its own: a shorter run of the same seed.
``second-reference``
    where a target's own masks are rehearsed: the references once more, because a mask of a run's own scores
    is known only when that run is over.
``outcome``
    every arm of every unit; those of a later ``stage`` in one of their own, after the gates that it names.

With ``anchors``, float32 runs, the nearest arms and masks are evidence of another study, and not run again.

What varies between studies is data; a change of one field is :func:`dataclasses.replace`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from safetensors.numpy import load as load_tensors

from halfulp.allocation.masks import Mask
from halfulp.errors import UsageError
from halfulp.paper.arms import mask_recipes, records
from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.measures import FP32
from halfulp.paper.arms.predictions import AGAIN, forecast, forecast_losses
from halfulp.paper.arms.run import run
from halfulp.paper.tokens import files_of
from halfulp.paper.values import known
from halfulp.study.protocol import Cell, Config, Estimand, Outcomes, Records, Stage, Values

Json = Any
Changes = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Masked:
    """The masks that a study makes, and the runs whose scores choose them."""

    source: int | None = None
    """The seed of the run whose scores choose for all targets; without, each target is its own source."""
    window: float
    """The share of the updates over which scores are summed."""
    of_source: mask_recipes.Recipes
    of_target: mask_recipes.Recipes = field(default_factory=dict)
    attribute: Mapping[str, Json] | None = None
    """Settings for a source's attribution of its rehearsal of the nearest arm to tiles, for score R."""


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Arms of another study that stand as evidence beside those that are run: same targets, same units."""

    evidence: str
    """The name under which a study declares it."""
    bundle: Bundle
    arms: tuple[str, ...]
    """The arms of that bundle; its float32 runs and its masks are included."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The runs of a decoder study: see the module's docstring."""

    scales: Mapping[str, Arm]
    """The settings that all runs share, by scale."""
    targets: tuple[int, ...]
    conditions: Mapping[str, Changes]
    """By name: what it changes of an arm; its grid, at least. A ``schedule`` has ``peak`` and ``floor`` as
    shares of the scale's own peak, and ``cycles``."""
    arms: Mapping[str, Changes]
    """By name: what it changes; a policy. ``mask=("source", "P")`` names a mask of the source or target."""
    anchor: Literal["raw", "projected"] = "raw"
    anchored: bool = True
    """True if targets have float32 runs of their own; without them, a source forecasts."""
    scopes: tuple[str, ...] = ()
    """Scopes that are forecast; none for no forecast."""
    rehearse: tuple[str, ...] = ()
    """Arms that the references rehearse, so that a forecast has their losses."""
    forecast_from: int | None = None
    """The seed of the run that all targets are forecast from; by default each from its own reference."""
    masked: Masked | None = None
    anchors: Anchors | None = None
    only_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Gates that must have passed before a later stage of arms runs (``stage`` in what an arm changes)."""
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
        """Return the cell of a unit's anchor."""
        condition, seed = self.units[unit]
        return self.reference.format(condition=condition, seed=seed)

    def cell(self, unit: str, arm: str) -> str:
        """Return the cell of an arm; if there is only one arm, that is the unit's name."""
        return unit if len(self.arms) == 1 else f"{unit}-{arm}"

    def rehearsals(self, condition: str, own: bool = False) -> dict[str, str]:
        """Return a reference's rehearsals of a condition, by arm; ``own`` selects masks of its own making."""
        grid = self.conditions[condition]["grid"]
        specs = {}
        for arm in self.rehearse:
            policy, (whose, mask) = self.arms[arm]["policy"], self.arms[arm].get("mask", ("", ""))
            how = f":tiles({mask})" if mask else "" if policy == "rne" else f":{policy}"
            if own == (whose == "target"):
                specs[arm] = grid + how
        return specs

    @property
    def again(self) -> bool:
        """True if references run once more, to rehearse masks that they made when they ended."""
        return any(self.rehearsals(condition, own=True) for condition in self.conditions)

    def source_of(self, unit: str) -> str:
        """Return the cell of the run that chose the tiles of a unit's masks."""
        assert self.masked is not None
        return "source" if self.masked.source is not None else self.reference_of(unit)

    def stage_of(self, arm: str) -> str:
        """Return the stage in which an arm runs."""
        return str(self.arms[arm].get("stage", "outcome"))

    @property
    def matched(self) -> dict[str, Changes]:
        """All arms of a unit, those that are evidence first."""
        if self.anchors is None:
            return dict(self.arms)
        return {arm: self.anchors.bundle.arms[arm] for arm in self.anchors.arms} | dict(self.arms)

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
        arm = Arm.from_json(config["arm"])
        schedule = changes.pop("schedule", None)
        if schedule is not None:
            peak = arm.recipe.schedule.peak
            rates = {key: share * peak for key, share in schedule.items() if key != "cycles"}
            rescheduled = replace(arm.recipe.schedule, **rates, cycles=schedule.get("cycles", 1))
            arm = replace(arm, recipe=replace(arm.recipe, schedule=rescheduled))
        return replace(arm, seed=seed, **changes)

    def _window(self, config: Config) -> int:
        assert self.masked is not None
        return round(self.masked.window * Arm.from_json(config["arm"]).recipe.updates)

    def references(self, config: Config) -> Iterator[Cell]:
        """Yield a float32 run for every anchor."""
        arms: dict[str, Arm] = {}
        for unit, (condition, seed) in self.units.items():
            grid, name = self.conditions[condition]["grid"], self.reference_of(unit)
            if name in arms:  # one raw anchor for several grids
                so_far, more = arms[name], tuple(self.rehearsals(condition).values())
                arms[name] = replace(so_far, audit=(*so_far.audit, grid), rehearse=(*so_far.rehearse, *more))
                continue
            arms[name] = self._reference(config, condition, seed)
        return (Cell(name=name, config=arm.to_json()) for name, arm in arms.items())

    def _reference(self, config: Config, condition: str, seed: int, **how: Any) -> Arm:
        # A forecast by scope is made of the tables.
        changes = {**self.conditions[condition], **({"tables": True} if self.scopes else {}), **how}
        grid = changes.pop("grid")
        if self.anchor == "projected":
            changes["projected"] = grid
        masked, rehearse = self.masked, tuple(self.rehearsals(condition).values())
        if masked is not None and masked.of_target:
            changes["scores"] = (grid, self._window(config))
        if masked is not None:
            changes["make"] = {k: dict(v) for k, v in masked.of_target.items()} or None
            unit = self.unit.format(condition=condition, seed=seed)
            changes["masks"] = {"stage": "source", "cell": self.source_of(unit)}
        return self._run(config, seed, audit=(grid,), rehearse=rehearse, **changes)

    def second_references(self, config: Config) -> Iterator[Cell]:
        """Yield the references again: the same float32 runs, which now know the masks of their own scores."""
        for unit, (condition, seed) in self.units.items():
            first, name = self._reference(config, condition, seed), self.reference_of(unit)
            arm = replace(
                first, scores=None, make=None, masks={"stage": "reference", "cell": name},
                rehearse=tuple(self.rehearsals(condition, own=True).values()),
            )  # fmt: skip
            yield Cell(name=name, config=arm.to_json())

    def forecasts(self, config: Config) -> Iterator[Cell]:
        """Yield a forecast for every unit, or the one of the source."""
        source, units = self.forecast_from is not None, self.units
        if self.forecast_from is not None:
            units = {"source": (next(iter(self.conditions)), self.forecast_from)}
        for name, (condition, seed) in units.items():
            grid, scopes = self.conditions[condition]["grid"], list(self.scopes)
            settings: dict[str, Json] = {"seed": seed, "grid": grid, "scopes": scopes}
            settings["reference"] = name if source else self.reference_of(name)
            settings |= {"stage": name} if source else {}
            settings |= {"rehearse": self.rehearsals(condition)} if self.rehearse else {}
            settings |= {"again": self.rehearsals(condition, own=True)} if self.again else {}
            yield Cell(name=name, config=settings)

    def forecast_source(self, config: Config) -> Iterator[Cell]:
        """Yield the run that targets are forecast from; it keeps the scale's schedule if they vary it."""
        assert self.forecast_from is not None
        own = {"schedule": None} if len(self.conditions) > 1 else {}
        arm = self._reference(config, next(iter(self.conditions)), self.forecast_from, **own)
        yield Cell(name="source", config=arm.to_json())

    def outcomes(self, config: Config, stage: str = "outcome") -> Iterator[Cell]:
        """Yield every arm of every unit, or those of a later stage."""
        for unit, (condition, seed) in self.units.items():
            for arm, how in self.arms.items():
                if self.stage_of(arm) != stage:
                    continue
                changes = {"stream_seed": seed + 1, **self.conditions[condition], **how}
                changes.pop("stage", None)
                if "mask" in how:
                    changes["mask"] = self._mask(unit, *how["mask"])
                yield Cell(name=self.cell(unit, arm), config=self._run(config, seed, **changes).to_json())

    def _mask(self, unit: str, whose: str, name: str) -> dict[str, str]:
        """Return the stage, cell and name under which the mask of an arm is kept."""
        if self.anchors is not None:
            return {"evidence": self.anchors.evidence, **self.anchors.bundle._mask(unit, whose, name)}
        stage = "source" if whose == "source" else "reference"
        cell = self.source_of(unit) if whose == "source" else self.reference_of(unit)
        return {"stage": stage, "cell": cell, "name": name}

    def source(self, config: Config) -> Iterator[Cell]:
        """Yield the source's float32 run, as long as its scores are summed; or one for every target."""
        assert self.masked is not None
        masked, window = self.masked, self._window(config)
        (condition,) = self.conditions.values()
        grid = condition["grid"]
        make = {k: dict(v) for k, v in masked.of_source.items()}
        how: dict[str, Any] = {"audit": (grid,), "scores": (grid, window), "make": make}
        if masked.attribute is not None:
            how |= {"rehearse": (grid,), "attribute": {"of": [grid], **masked.attribute}}
        seeds = {self.source_of(unit): masked.source or seed for unit, (_, seed) in self.units.items()}
        for name, seed in seeds.items():
            arm = self._run(config, seed, **how)
            yield Cell(name=name, config=replace(arm, recipe=replace(arm.recipe, updates=window)).to_json())

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A study's stages, in order: what is forecast is sealed before any outcome."""
        reference = Stage(name="reference", kind="reference", cells=self.references, run=run)
        source = replace(reference, name="source", cells=self.source)
        forecasts = Stage(
            name="forecast", kind="prediction", cells=self.forecasts, reads=("reference",),
            run=forecast if self.scopes else forecast_losses,
        )  # fmt: skip
        stages: list[Stage] = []
        masked, read = self.masked, tuple[str, ...]()
        if self.forecast_from is not None:
            stages += [replace(source, cells=self.forecast_source), replace(forecasts, reads=("source",))]
        if masked is not None:
            stages.append(source)
            read = ("source",)
            reference = replace(reference, reads=read)
        if self.anchors is None and self.anchored:
            stages.append(reference)
        if masked is not None and masked.of_target:
            read = (*read, "reference")
        if self.again:
            stages.append(replace(reference, name=AGAIN, cells=self.second_references, reads=("reference",)))
            forecasts = replace(forecasts, reads=("reference", AGAIN))
        if (self.scopes or self.rehearse) and self.forecast_from is None and self.anchors is None:
            stages.append(forecasts)
        for name in dict.fromkeys(map(self.stage_of, self.arms)):
            cells, gates = functools.partial(self.outcomes, stage=name), tuple(self.only_if.get(name, ()))
            stages.append(Stage(name=name, kind="outcome", cells=cells, run=run, reads=read, only_if=gates))
        return tuple(stages)

    # ---- records ----

    def over(self, records: Records, condition: str | None = None) -> list[Unit]:
        """Return the units, or those of a condition, with their records."""
        return [Unit(self, records, u) for u, (c, _) in self.units.items() if condition in (None, c)]

    def ran(self, records: Records) -> list[str]:
        """Return the arms that have records, those that are evidence first."""
        (first, *_) = self.over(records)
        return [arm for arm in self.matched if first.ran(arm)]

    def estimand(
        self, name: str, what: str, measure: Callable[..., float | None], *, total: bool = False,
        **sealed: Any,
    ) -> Estimand:  # fmt: skip
        """Make an estimand of a measure of every unit; its arguments are sealed.

        With ``scopes=``, of every unit and scope: ``e5m2-1337 core``. ``total``: the sum of all units.
        """

        @functools.wraps(measure)  # a protocol shows its name
        def compute(records: Records, scopes: Sequence[str] = (), **arguments: Any) -> Values:
            within = {f" {scope}": {"scope": scope} for scope in scopes} or {"": {}}
            values = {
                unit.name + scope: measure(unit, **more, **arguments)
                for unit in self.over(records)
                for scope, more in within.items()
            }
            there = known(values.values())
            return values if not total else {"all": sum(there) if len(there) == len(values) else None}

        return Estimand(name=name, what=what, compute=compute, args=sealed)


@dataclass(frozen=True)
class Unit:
    """One target under one condition: where its records are."""

    bundle: Bundle
    outcomes: Records
    name: str

    def _at(self, arm: str) -> tuple[Outcomes, str, str]:
        """Return the records, stage and cell of an arm, or of the float32 anchor; they may be evidence."""
        anchors, outcomes = self.bundle.anchors, cast(Outcomes, self.outcomes)
        if anchors is not None and arm in (FP32, *anchors.arms):
            return Unit(anchors.bundle, outcomes.evidence[anchors.evidence], self.name)._at(arm)
        if arm == FP32:
            return outcomes, "reference", self.bundle.reference_of(self.name)
        return outcomes, self.bundle.stage_of(arm), self.bundle.cell(self.name, arm)

    def ran(self, arm: str) -> bool:
        """Return True if the stage of an arm has records here; a later stage may not have been authorised."""
        outcomes, stage, _ = self._at(arm)
        return stage in outcomes

    def run(self, arm: str) -> records.Record:
        """Return the record of an arm, or of the float32 anchor."""
        outcomes, stage, cell = self._at(arm)
        return outcomes[stage][cell]

    @property
    def siblings(self) -> list[Unit]:
        """Return the other targets under the same condition."""
        condition = self.bundle.units[self.name][0]
        return [unit for unit in self.bundle.over(self.outcomes, condition) if unit.name != self.name]

    def contexts(self, arm: str) -> records.Array | None:
        """Return the held-out loss of every context at every evaluation of an arm, or of the anchor.

        None where they were not kept: the first release kept none.
        """
        outcomes, stage, cell = self._at(arm)
        try:
            kept = outcomes.attached(stage, cell, "contexts.safetensors")
        except UsageError:
            return None
        return np.asarray(load_tensors(kept)["loss"], dtype=np.float64)

    def of_forecast(self, what: str, scope: str = "") -> Any:
        """Return a quantity of the forecast, of a scope if it has several; None where it was not recorded."""
        cell = self.name if self.bundle.forecast_from is None else "source"
        value = self.outcomes["forecast"][cell].get(what)
        return value[scope] if scope and isinstance(value, Mapping) else value

    def forecast(self, scope: str, predictor: str = "frozen") -> records.Array | None:
        """Return the forecast frozen fraction of every update; None where that was not recorded."""
        values = self.of_forecast(predictor, scope)
        return None if values is None else np.asarray(values)

    @property
    def source(self) -> records.Record:
        """Return the float32 run that the forecast was made of: the unit's own, or the source of all."""
        return self.run(FP32) if self.bundle.forecast_from is None else self.outcomes["source"]["source"]

    def rehearsed_loss(self, arm: str, bound: str, update: int | None = None) -> float | None:
        """The loss of an arm after an update, the last by default, as a rehearsal has it, if there is one."""
        losses, at = self.of_forecast("losses"), str(self.source["updates"] if update is None else update)
        return losses[arm][at][bound] if losses is not None and at in losses.get(arm, ()) else None

    def _masks(self, whose: str) -> tuple[Outcomes, str, str]:
        """Return the records, stage and cell of the masks of the ``source`` or ``target``."""
        where, outcomes = self.bundle._mask(self.name, whose, ""), cast(Outcomes, self.outcomes)
        outcomes = outcomes.evidence[where["evidence"]] if "evidence" in where else outcomes
        return outcomes, where["stage"], where["cell"]

    def masks(self, whose: str) -> records.Record:
        """Return the record of these masks."""
        outcomes, stage, cell = self._masks(whose)
        record: records.Record = outcomes[stage][cell]["masks"]
        return record

    def packed(self, whose: str) -> dict[str, Mask]:
        """Unpack these masks from the file beside their record."""
        outcomes, stage, cell = self._masks(whose)
        return mask_recipes.unpacked(outcomes.attached(stage, cell, mask_recipes.PACKED), f"{stage}/{cell}")

    def budget(self, arm: str) -> int:
        """Return the bytes that the mask of an arm was to spend."""
        whose, name = self.bundle.arms[arm]["mask"]
        return int(self.masks(whose)["budget"][name])
