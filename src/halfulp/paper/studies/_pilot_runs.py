"""The runs of ``pilot-forecast``: decoders and a classifier as pilots take them.

A cell of its first stage makes everything that a pilot could pay for: the reference with every format
rehearsed, twins on a part of the batch, a nudged twin, forks at several updates. What a budget buys of it is
decided afterwards, by the rule of :class:`halfulp.pilots.pilot.Pilot`, so one set of runs answers for every
budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp.audit.rehearsal.specs import PULL
from halfulp.numbers.streams import Stream
from halfulp.paper.arms.arm import BYTES, Arm
from halfulp.paper.arms.family import SMALL_GPT2, SMALL_MODERN, SMALL_NEOX, at, narrow
from halfulp.paper.models.decoder import Decoder
from halfulp.paper.models.training import Positions, Schedule, adamw, sequences, starts
from halfulp.paper.tokens import open_corpus
from halfulp.paper.values import finite
from halfulp.pilots import rungs
from halfulp.pilots.estimates import Estimate, Forks, Seen, Twin, estimate, floor_of, gaps
from halfulp.pilots.ladder import SLACK, Ladder, fork_plan
from halfulp.study.protocol import Running
from halfulp.verdicts.intervals import SMALLEST, family_of, shipped
from halfulp.writeback.rules.lion import Lion

Json = Any
BOUNDS = ("lower", "point", "upper")
ESTIMATORS = ("free", "twin", "raw", "fork 10%", "fork 20%", "fork 40%", "bracket")
"""Every estimator, forks by how much of the run they were."""


def _optimizer(kind: str, model: torch.nn.Module, arm: Arm) -> torch.optim.Optimizer:
    """AdamW, Lion at a quarter of the rate, or SGD with momentum, with decay on matrices."""
    plain = adamw(model, arm.recipe)
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in plain.param_groups]
    if kind == "lion":
        return Lion(groups, lr=1e-4)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return plain


class DecoderRun:
    """A decoder on text; the loop is that of :class:`~halfulp.paper.models.training.Training`."""

    def __init__(
        self, arm: Arm, optimizer: str, tokens: np.ndarray[Any, Any], held_out: np.ndarray[Any, Any]
    ) -> None:
        self.arm, self.tokens, self.held_out = arm, tokens, held_out
        self.model = Decoder(arm.model, seed=arm.seed)
        self.optimizer = _optimizer(optimizer, self.model, arm)

    def batch(self, update: int) -> Positions:
        recipe = self.arm.recipe
        return starts(recipe.seed, "training", update, recipe.batch, len(self.tokens) - recipe.context)

    def step(self, batch: Positions, update: int) -> None:
        recipe = self.arm.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.schedule.rate(update)
        self.optimizer.zero_grad(set_to_none=True)
        x, y = sequences(self.tokens, batch, recipe.context, torch.device("cpu"))
        self.model.loss(x, y).backward()  # type: ignore[no-untyped-call]  # torch's
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        recipe, losses = self.arm.recipe, []
        for i in range(recipe.eval_batches):
            choices = len(self.held_out) - recipe.context
            begin = starts(recipe.eval_seed, "evaluation", i, recipe.batch, choices)
            losses.append(
                float(self.model.loss(*sequences(self.held_out, begin, recipe.context, torch.device("cpu"))))
            )
        return sum(losses) / len(losses)


class ClassifierRun:
    """A run that is not a decoder: a perceptron that finds the largest of ten inputs."""

    def __init__(self, schedule: Schedule, batch: int, seed: int) -> None:
        self.schedule, self.size, self.seed = schedule, batch, seed
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) / 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def _drawn(self, purpose: str, step: int, count: int) -> torch.Tensor:
        words = Stream(seed=self.seed, name=purpose, step=step).words(2 * count * 64)
        u = (words.astype(np.float64) + 0.5) / 2**32
        return (
            torch.from_numpy(np.sqrt(-2 * np.log(u[::2])) * np.cos(2 * np.pi * u[1::2]))
            .float()
            .view(count, 64)
        )

    def batch(self, update: int) -> torch.Tensor:
        return self._drawn("training", update, self.size)

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(x), x[:, :10].argmax(dim=1))

    def step(self, batch: torch.Tensor, update: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(update)
        self.optimizer.zero_grad(set_to_none=True)
        self._loss(batch).backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        return float(self._loss(self._drawn("evaluation", 0, 512)))


def training(config: Mapping[str, Json], file: Callable[[str], Path]) -> rungs.Factory:
    """Return the runs of a unit's config."""
    formats = tuple(config["formats"])
    if "classifier" in config:
        given = config["classifier"]
        schedule = Schedule(**given["schedule"])
        make: Any = partial(ClassifierRun, schedule, given["batch"], given["seed"])
        return rungs.Factory(make=make, updates=schedule.horizon, formats=formats)
    arm = Arm.from_json(config["arm"])
    tokens, held_out = open_corpus(file, arm.corpus, arm.model.vocabulary)
    make = partial(DecoderRun, arm, config.get("optimizer", "adamw"), tokens, held_out)
    return rungs.Factory(make=make, updates=arm.recipe.updates, formats=formats)


def measure(
    config: Mapping[str, Json], file: Callable[[str], Path], seen: Callable[[float, float], None]
) -> dict[str, Json]:
    """Make everything that could be paid for; the losses that it ended with.

    ``parts`` are the sequences of the twins; ``forks`` the bounds of the forks by their share of the run.
    """
    what = training(config, file)
    updates = {share: round(what.updates * (1 - float(share))) for share in config["forks"]}
    full = rungs.reference(what, fork_at=set(updates.values()), bounds=BOUNDS)
    record: dict[str, Json] = {"reference": _losses_of(full), "twins": {}, "forks": {}}
    each = [*map(str, config["parts"]), *updates]
    seen(1, len(each) + 1)
    for done, rung in enumerate(each, start=2):
        if rung in updates:
            state, bounds = full.forked[updates[rung]], config["forks"][rung]
            record["forks"][rung] = {
                f: {b: finite(rungs.fork(what, f, b, state)) for b in bounds} for f in what.formats
            }
        else:
            small, part = rungs.reference(what, int(rung)), int(rung)
            real = {f: finite(rungs.twin(what, f, part)) for f in what.formats}
            nudged = finite(rungs.nudged(what, part))
            record["twins"][rung] = {**_losses_of(small), "nudged": nudged, "format": real}
        seen(done, len(each) + 1)
    return record


def _losses_of(reference: rungs.Reference) -> dict[str, Json]:
    as_if = {spec: {b: finite(x) for b, x in losses.items()} for spec, losses in reference.as_if.items()}
    real, again = finite(reference.real), finite(reference.again)
    return {"start": reference.start, "real": real, "again": again, "as_if": as_if}


def batch_of(config: Mapping[str, Json]) -> int:
    """Return how many sequences a batch of a unit has."""
    if "classifier" in config:
        return int(config["classifier"]["batch"])
    return int(Arm.from_json(config["arm"]).recipe.batch)


def seen_of(
    record: Mapping[str, Json], config: Mapping[str, Json], part: str, share: str, *, floor: bool = True
) -> dict[str, Seen]:
    """Return what a pilot knows of every format that paid for these rungs; an empty one was not paid."""
    full, by_format, small = record["reference"], {}, record["twins"].get(part)
    for spec, losses in full["as_if"].items():
        twin = None
        if small is not None:
            twin = Twin(
                share=int(part) / batch_of(config), reference=loss(small["real"]),
                upper=loss(small["as_if"][spec]["upper"]), real=loss(small["format"][spec]),
            )  # fmt: skip
        paid = record["forks"].get(share, {}).get(spec)
        paid = None if paid is None else {bound: loss(x) for bound, x in paid.items()}
        by_format[spec] = Seen(
            start=full["start"], reference=full["real"], upper=loss(losses["upper"]),
            point=loss(losses["point"]), twin=twin, family=family_of(spec),
            forks=None if paid is None else Forks(share=float(share), losses=paid),
            floor=SMALLEST if small is None or not floor
            else floor_of(full["real"], full["again"], small["real"], small["nudged"]),
        )  # fmt: skip
    return by_format


def ladder(config: Mapping[str, Json], budget: float) -> Ladder:
    """Return what a share of the run per format pays for, in sequences."""
    count = len(config["formats"])
    return Ladder(budget=budget * count, formats=count, batch=batch_of(config))


def bought(record: Mapping[str, Json], config: Mapping[str, Json], budget: float) -> dict[str, Estimate]:
    """Return what a pilot would say that may spend a share of the run on every format.

    The rule is the pilot's own; of twins and forks, those are taken that were made, the nearest that cost no
    more.
    """
    plan = ladder(config, budget)
    wanted, left = plan.part, plan.left - plan.floor * plan.share(plan.part or 0)
    part = "" if wanted is None else str(max(p for p in config["parts"] if p <= wanted))
    seen = seen_of(record, config, part, "", floor=plan.floor)
    suspects = [f for f in seen.values() if f.twin is None or f.twin.shallow(f.floor)]
    each, bounds = fork_plan(left + SLACK, len(suspects))
    share = max((s for s in config["forks"] if float(s) <= each), key=float, default="")
    forked = seen_of(record, config, part, share, floor=plan.floor)
    estimates = {}
    for spec, known in seen.items():
        one = forked[spec] if not part or known.reads_low() else known
        if one.forks is not None:
            losses = {b: x for b, x in one.forks.losses.items() if b in bounds}
            one = replace(one, forks=replace(one.forks, losses=losses))
        estimates[spec] = estimate(one, shipped())
    return estimates


def loss(kept: float | None) -> float:
    """Return a loss of a record; a run that diverged has none."""
    return math.inf if kept is None else kept


def pilot(running: Running) -> dict[str, Json]:
    """A cell: everything that a pilot of a unit could pay for, and the point of the rule before this one."""
    record = measure(running.config, running.data, running.progress)
    old = rungs.reference(replace(training(running.config, running.data), pull=PULL))
    return {**record, "old": {spec: finite(losses["point"]) for spec, losses in old.as_if.items()}}


def forecast(running: Running) -> dict[str, Json]:
    """Run a cell that forecasts what every budget buys of a unit."""
    record, config = running.read("pilot", running.config["unit"]), running.config
    by_budget = {}
    for budget in config["budgets"]:
        each = bought(record, config, budget)
        by_budget[f"{budget:g}"] = {
            spec: {
                "gap": finite(e.gap), "low": finite(e.low), "high": finite(e.high), "kind": e.kind,
                "trusted": e.trusted, "floor": e.floor,
            }
            for spec, e in each.items()
        }  # fmt: skip
    real = record["reference"]["real"]
    by_kind: dict[str, dict[str, float | None]] = {spec: {} for spec in config["formats"]}
    for share in config["forks"]:
        for spec, seen in seen_of(record, config, "1", share).items():
            for kind, gap in gaps(seen).items():
                by_kind[spec][f"fork {float(share):.0%}" if kind == "fork" else kind] = finite(gap)
    old = {spec: None if x is None else finite(x - real) for spec, x in record["old"].items()}
    return {"reference": real, "budgets": by_budget, "old": old, "estimators": by_kind}


def outcome(running: Running) -> dict[str, Json]:
    """Run a cell that really trains in one format, and return its loss."""
    what = training(running.config, running.data)
    (spec,) = what.formats
    return {"loss": finite(rungs.twin(what, spec, None))}


# ---- units ------------------------------------------------------------------------------------------

KINDS = {"gpt2": (SMALL_GPT2, 256), "modern": (SMALL_MODERN, 192), "neox": (SMALL_NEOX, 256)}
"""The families, and the hidden widths of their smaller members on bytes."""


def decoder(
    kind: str, *, peak: float, updates: int, batch: int, seed: int, optimizer: str = "adamw"
) -> dict[str, Json]:
    """Return the config of a unit: a decoder on bytes, with a warmup of a tenth and a cosine to a tenth."""
    shared = narrow(*KINDS[kind])
    schedule = replace(shared.recipe.schedule, peak=peak, floor=peak / 10)
    recipe = replace(shared.recipe, batch=batch, eval_batches=max(4, 192 // batch), schedule=schedule)
    arm = Arm(model=shared.model, recipe=recipe, corpus=BYTES, seed=seed)
    arm = at(arm, updates=updates, warmup=min(100, updates // 10), eval_every=updates)
    return {"arm": arm.to_json(), "optimizer": optimizer}


def classifier(*, peak: float, updates: int, batch: int, seed: int) -> dict[str, Json]:
    """Return the config of a unit that is not a decoder, at a constant rate."""
    schedule = Schedule(peak=peak, floor=peak, warmup=0, horizon=updates)
    return {"classifier": {"schedule": asdict(schedule), "batch": batch, "seed": seed}}
