"""Define what the studies of exact-budget allocation share: decoders, arms, masks, and their estimands.

All are one bundle: a float32 source sums scores over the first updates and makes masks of them, the float32
reference of every target rehearses some of these masks before any run on the grid, and arms have masters
where masks say. A mask's name is a score and a budget in percent: ``L-10``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from halfulp.paper.arms import Bundle, measures, plots
from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.family import PAPER_GPT2, SMALL_GPT2, SMOKE_GPT2, at
from halfulp.paper.arms.standard import forecast_recoveries, losses, masks, recovery
from halfulp.paper.studies.declared import declared, gate, rule
from halfulp.study.protocol import Estimand, Gate, Records, Study
from halfulp.writeback import TileMaster

E5M2: Mapping[str, Mapping[str, str]] = {"e5m2": {"grid": "e5m2"}}
TIED = "transformer.wte.weight"
PLAIN = {policy: {"policy": policy} for policy in ("rne", "master")}
ROUNDS = {"moments": 2, "points": 3, "batches": 4}
"""Settings for a source's attribution of its rehearsal to tiles (score R): in mid-run and at the end."""

SMOKE = replace(SMOKE_GPT2, model=replace(SMOKE_GPT2.model, vocabulary=240))
"""With 1040 tiles, so that 5, 10 and 20 percent are whole numbers of them, and fit in the tied matrix."""


def halved(arm: Arm) -> Arm:
    """Return a small arm on half the sequences a batch, without its tables: hundreds of runs have to fit."""
    return replace(arm, recipe=replace(arm.recipe, batch=6), tables=False)


SMALL = halved(SMALL_GPT2)
THOUSAND = {
    "smoke": at(SMOKE, updates=10, warmup=1, eval_every=5, horizon=30),
    "small": at(SMALL, updates=40, warmup=4, eval_every=20, horizon=120),
    "medium": at(SMALL, updates=200, warmup=20, eval_every=50, horizon=600),
    "paper": at(PAPER_GPT2, updates=1000, warmup=100, eval_every=200, horizon=3000),
}
"""GPT-2 for 1000 updates of a schedule of 3000, with windows and warmups in the paper's proportions."""


def named(score: str, percent: int) -> str:
    """Return the name of a mask."""
    return f"{score}-{percent}"


def by_scores(scores: Iterable[str], *percents: int) -> dict[str, dict[str, Any]]:
    """Recipes for masks by scores at budgets; R by the source's attributed rehearsal."""
    return {
        named(score, percent): {"score": score, "share": percent / 100}
        | ({"rehearsal": 0} if score == "R" else {})
        for percent in percents
        for score in scores
    }


def at_random(percent: int, count: int = 5) -> dict[str, dict[str, Any]]:
    """Recipes for fixed random masks, others at every budget, the same in every target."""
    return {
        f"random-{i + 1}-{percent}": {"random": 100 * percent + i, "share": percent / 100}
        for i in range(count)
    }


def masters(*names: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Arms with masters where masks of the source say, named after them."""
    return {name: {"policy": TileMaster.name, "mask": ("source", name), **more} for name in names}


# ---- what is computed -------------------------------------------------------------------------------------


def estimands(runs: Bundle) -> tuple[Estimand, ...]:
    """The gap, what every arm wins back of it, what was forecast of that, and whether all is as declared."""
    others = [arm for arm in runs.matched if arm != "rne"]
    masked = [arm for arm in runs.arms if "mask" in runs.arms[arm]]
    return (
        runs.estimand("gap", f"final loss of rne above {runs.anchor} fp32, nats", measures.gap),
        *(
            runs.estimand(f"recovery-{a}", f"share of the gap won back by {a}", measures.recovery, arm=a)
            for a in others
        ),
        *(
            runs.estimand(
                f"foretold-{arm}", f"the same of {arm}, as rehearsed", measures.forecast_recovery, arm=arm
            )
            for arm in runs.rehearse
            if arm != "rne"
        ),
        *(
            [runs.estimand("bytes-off", "largest distance of masters from the budget", measures.bytes_off,
                           arms=masked)] if masked else []
        ),
        runs.estimand("matched", "1 where the arms began as declared", measures.matched),
    )  # fmt: skip


def less(runs: Bundle, name: str, arm: str, over: Sequence[str], what: str = "") -> Estimand:
    """Return the estimand of an arm's recovery less the largest among others."""
    others = what or " and ".join(over)
    return runs.estimand(
        name, f"recovery of {arm} less the largest of {others}", measures.advantage, arm=arm, over=list(over)
    )


def floors(blanket: float) -> tuple[Gate, ...]:
    """Make the gates without which a recovery means nothing."""
    return (
        gate("material", "gap > 0.1", "without a gap a recovery has no meaning"),
        gate("blanket", f"recovery-master > {blanket}", "or masters somewhere say nothing"),
        gate("exact", "bytes-off == 0"),
        gate("matched", "matched == 1"),
    )


UNMET = (
    rule("not matched", failed=("matched",)),
    rule("budget not met exactly", failed=("exact",)),
    rule("no material gap", failed=("material",)),
    rule("masters everywhere do not win the gap back", failed=("blanket",)),
)
"""The labels where a floor is not met."""


# ---- what is shown ----------------------------------------------------------------------------------------


def tables(runs: Bundle, beside: str = "") -> dict[str, Any]:
    """Losses, recoveries, recoveries as forecast; where masks lie, and what they share with one of them."""
    tables: dict[str, Any] = {"losses": partial(losses, runs), "recovery": partial(recovery, runs)}
    if len(runs.rehearse) > 1:
        tables["forecast recoveries"] = partial(forecast_recoveries, runs)
    if beside:
        tables["masks"] = partial(masks, runs, beside=beside)
    return tables


def figure(runs: Bundle, highlight: str, faint: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figure of recovery by arm, the best first in the order of declaration."""
    return {"recovered": partial(_recovered, runs, highlight=highlight, faint=tuple(faint))}


def study(
    module: str, runs: Bundle, *more: Estimand, beside: str = "", highlight: str, faint: Sequence[str] = (),
    **given: Any,
) -> Study:  # fmt: skip
    """Return the study of a module: what all of them compute and show, and more."""
    return declared(
        module, runs, estimands=(*estimands(runs), *more), tables=tables(runs, beside),
        figures=figure(runs, highlight, faint), **given,
    )  # fmt: skip


def _recovered(runs: Bundle, records: Records, highlight: str, faint: Sequence[str]) -> Any:
    arms = [arm for arm in runs.ran(records) if arm != "rne"]
    return plots.recovered(runs, records, arms=arms, highlight=highlight, faint=faint)
