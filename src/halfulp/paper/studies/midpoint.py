"""Does a reference tell which rates still learn? The locked midpoint interpolation (paper, app:e4).

The effective-mantissa testbed (a two-layer tanh student of width 64, 512 examples, noise 0.1, whole-batch
descent in float64, 3,000 updates) at six rates that the phase diagram does not have, the geometric midpoints
of its first seven, and at seeds 2027 to 2029. Stage ``forecast`` runs the 18 references and says, for each of
m = 1 to 5, whether the run on that grid will learn: 90 forecasts, sealed before stage ``outcome`` runs the
90 cells. An outcome refuses to start from other data or another start than its forecast.

A cell is positive if it makes half of the reference's progress in test error, or more. Predictors and onsets
are those of `models.learning_forecasts`; a fourth predictor looks at no reference:

    monotone      positive from a fixed rate up: 0.4, 0.2, 0.1, 0.05, 0.025 for m = 1 to 5

Those floors are the lowest rates of the *forecast* historical windows; with them 75 of 90 cells and no
window come out right wherever positives start at rate * 2**m = 0.566, which is what the paper prints.

A *window* is the set of rates whose median over seeds is positive. The rule, all four or no promotion:
directional windows match for 80% of mantissas (4 of 5); 80% of eligible onsets lie within 15% (both exist,
and the measured one comes from update 3 to before the last); directional cell accuracy is no worse than
symmetric, and no worse than monotone. Scalar is reported and decides nothing. A reference without progress
ends the matter before the rule is asked. Table ``misses`` takes apart every positive cell that directional
called negative.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halfulp.measures.crossings import TOLERANCE, crossing
from halfulp.paper import panels
from halfulp.paper.models import learning_forecasts as learning
from halfulp.paper.models.digests import digest, refuse_other
from halfulp.paper.models.learning_forecasts import LEARNED as POSITIVE
from halfulp.paper.models.learning_forecasts import PREDICTORS as TIMED
from halfulp.paper.models.learning_forecasts import SIDE, SIDES, Array, follow, forecasts, regression
from halfulp.paper.models.teacher import CHOSEN, Problem
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule, scaled
from halfulp.paper.values import grouped, less, quotient
from halfulp.study.protocol import Cell, Config, Estimand, Json, Records, Running, Stage, Table, Values

PREDICTORS = (*TIMED, "monotone")
EARLIEST = 3
"""Onsets measured before this update carry no timing ratio (tab:e4-prospective)."""
TAKEN_APART = {
    "onset": "measured onset", "moved_ever": "ever moved", "moved_ever_in": "input weights",
    "moved_ever_out": "output weights", "moved_at_most": "moved at most in one update",
    "after_cut": "learned after the forecast onset",
}  # fmt: skip
"""The quantities that explain a miss, and their names in tables."""


# ---- cells --------------------------------------------------------------------------------------------


def reference_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each rate and seed."""
    for i, rate in enumerate(config["rates"], 1):
        for seed in config["seeds"]:
            shared = {k: v for k, v in config.items() if k not in ("rates", "seeds")}
            yield Cell(name=f"rate{i}-{seed}", config={**shared, "rate": rate, "seed": seed})


def outcome_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each reference and mantissa."""
    for cell in reference_cells(config):
        for m in config["mantissas"]:
            yield Cell(name=f"m{m}-{cell.name}", config={**cell.config, "m": m, "reference": cell.name})


def fingerprint(p: Problem) -> str:
    """SHA-256 of every number that a run starts from."""
    return digest(p.train.x, p.train.y, p.test.x, p.test.y, p.start)


def learned(start: float, errors: Array, steps: int, end: float | None) -> float:
    """Return the share of the progress from ``start`` to ``end`` that is there after so many steps.

    Zero where the run diverged before, or where there is no progress to take a share of (``end`` None).

    >>> import numpy as np
    >>> learned(1.0, np.array([0.8, 0.6, 0.5]), 2, 0.5)
    0.8
    """
    if steps == 0 or end is None or steps > len(errors) or not start > end:
        return 0.0
    return learning.learned(start, errors[steps - 1], end)


def forecast(cell: Running) -> Mapping[str, Json]:
    """One reference, and what every predictor says of every mantissa."""
    c, p = cell.config, regression(cell.config)
    ran = follow(p, c["rate"], c["steps"], cell, audit=[f"m{m}" for m in c["mantissas"]])
    said = forecasts(ran, c["mantissas"])
    for m in c["mantissas"]:
        for each in said[f"m{m}"].values():  # what has diverged has learned nothing
            each |= {side: 0.0 if each[side] is None else each[side] for side in SIDES}
        promised = float(c["rate"] >= c["floors"][str(m)])
        said[f"m{m}"]["monotone"] = {"onset": None, **dict.fromkeys(SIDES, promised)}
    return {
        "rate": c["rate"], "seed": c["seed"], "start": ran.start,
        "end": None if ran.diverged else ran.end, "data": fingerprint(p),
        "path": hashlib.sha256(ran.trainer.weights.tobytes()).hexdigest(), "forecast": said,
    }  # fmt: skip


def outcome(cell: Running) -> Mapping[str, Json]:
    """One run on a grid, and what a miss is made of."""
    c = cell.config
    sealed, grid, p = cell.read("forecast", c["reference"]), f"m{c['m']}", regression(c)
    refuse_other(cell.name, sealed, {"data": fingerprint(p)})
    ran = follow(p, c["rate"], c["steps"], cell, store=grid)
    trainer, series = ran.trainer, ran.series
    crossed = crossing(series.frozen / series.size)
    cut = sealed["forecast"][grid]["directional"]["onset"]
    moves, moved = 1 - series.frozen / series.size, trainer.state()["moved"]
    total = learned(sealed["start"], series.test, c["steps"], sealed["end"])
    return {
        "m": c["m"], "rate": c["rate"], "seed": c["seed"], "reference": c["reference"], "steps": c["steps"],
        "diverged": trainer.diverged,
        "learned": total,
        "first": crossed.first,
        "onset": None if trainer.diverged else crossed.persistent,
        "moved_ever": float(moved.mean()),
        "moved_ever_in": float(moved[p.net.part("W1")].mean()),
        "moved_ever_out": float(moved[p.net.part("W2")].mean()),
        "moved_at_most": float(moves.max()),
        "moved_mean": float(moves.mean()),
        "after_cut": 0.0 if cut is None
        else total - learned(sealed["start"], series.test, cut - 1, sealed["end"]),
    }  # fmt: skip


# ---- estimands ----------------------------------------------------------------------------------------


def _said(records: Records, cell: Mapping[str, Json], predictor: str) -> Mapping[str, Json]:
    said: Mapping[str, Json] = records["forecast"][cell["reference"]]["forecast"][f"m{cell['m']}"][predictor]
    return said


def _shares(records: Records, predictor: str | None = None, side: str = SIDE) -> list[float]:
    """Learned shares of every cell; measured, or as a predictor says."""
    cells = records["outcome"].values()
    return [c["learned"] if predictor is None else _said(records, c, predictor)[side] for c in cells]


def windows(records: Records, predictor: str | None = None) -> dict[int, list[float]]:
    """Rates whose median learned share is positive, by mantissa; measured, or as a predictor says."""
    cells = zip(records["outcome"].values(), _shares(records, predictor), strict=True)
    return learning.windows(learning.gathered((cell["m"], cell["rate"], share) for cell, share in cells))


def windows_matched(records: Records, predictor: str) -> tuple[int, int]:
    """Mantissas whose window is the measured one, of all."""
    return learning.matched(windows(records), windows(records, predictor))


def window_matches(records: Records, predictors: Sequence[str] = PREDICTORS) -> Values:
    """Mantissas with the measured window, by predictor."""
    counts = {p: windows_matched(records, p) for p in predictors}
    return {p: n / of for p, (n, of) in counts.items()}


def accuracy(records: Records, side: str = SIDE) -> Values:
    """Cells called as they came out, by predictor."""
    came = _shares(records)
    said = {p: _shares(records, p, side) for p in PREDICTORS}
    return {p: learning.accuracy(list(zip(each, came, strict=True))) for p, each in said.items()}


def accuracy_by_side(records: Records) -> Values:
    """Directional accuracy, with the error before and after the onset."""
    return {side: accuracy(records, side)["directional"] for side in SIDES}


def progress(records: Records) -> Values:
    """By reference, the share of its starting error that it removed; none for one that diverged."""
    each = records["forecast"].items()
    return {name: quotient(less(r["start"], r["end"]), r["start"]) for name, r in each}


def _onsets(records: Records, predictor: str) -> list[bool]:
    """Of every eligible cell, whether its onset is within the tolerance."""
    within = []
    for cell in records["outcome"].values():
        said, came = _said(records, cell, predictor)["onset"], cell["onset"]
        if said is not None and came is not None and EARLIEST <= came < cell["steps"]:
            within.append(abs(said - came) <= TOLERANCE * came)
    return within


def onset_within(records: Records, predictors: Sequence[str] = TIMED) -> Values:
    """Eligible onsets within 15%."""
    matches = {p: _onsets(records, p) for p in predictors}
    return {p: quotient(sum(each), len(each)) for p, each in matches.items()}


def onset_eligible(records: Records) -> Values:
    """Cells with a timing ratio."""
    return {p: float(len(_onsets(records, p))) for p in TIMED}


def against(records: Records, other: str) -> Values:
    """Accuracy of the directional predictor, less that of another."""
    share = {p: value or 0.0 for p, value in accuracy(records).items()}
    return {f"directional less {other}": share["directional"] - share[other]}


def misses(records: Records) -> list[tuple[str, Mapping[str, Json]]]:
    """Positive cells that directional called negative."""
    return [
        (name, cell) for name, cell in records["outcome"].items()
        if cell["learned"] >= POSITIVE > _said(records, cell, "directional")[SIDE]
    ]  # fmt: skip


def false_negatives(records: Records, onsets: Sequence[int] = ()) -> Values:
    """Positive cells called negative; with onsets, those whose majority is frozen from there on."""
    return {"study": float(sum(not onsets or cell["onset"] in onsets for _, cell in misses(records)))}


# ---- reports ------------------------------------------------------------------------------------------


def predictors_table(records: Records) -> Table:
    """Tabulate the accuracy of each predictor."""
    matches, share, within = window_matches(records), accuracy(records), onset_within(records)
    return Table(
        columns=("predictor", "windows matched", "cell accuracy", "onsets within 15%", "onsets eligible"),
        rows=[(p, matches[p], share[p], within.get(p), onset_eligible(records).get(p)) for p in PREDICTORS],
        caption="Cells that share one of the references are paired coverage tests, not replicates.",
    )


def windows_table(records: Records) -> Table:
    """Tabulate measured and forecast windows by mantissa."""
    sides = {"measured": windows(records)} | {p: windows(records, p) for p in PREDICTORS}
    rows: list[Sequence[str | float | None]] = [
        (m, *(" ".join(f"{rate:.4g}" for rate in side[m]) for side in sides.values()))
        for m in sides["measured"]
    ]
    return Table(columns=("mantissa bits", *sides), rows=rows, caption="Rates whose median run learns.")


def misses_table(records: Records) -> Table:
    """Tabulate the learning cells that were forecast not to learn."""
    rows: list[Sequence[str | float | None]] = []
    for name, cell in misses(records):
        said = _said(records, cell, "directional")
        rows.append((name, cell["learned"], said[SIDE], said["onset"], *(cell[key] for key in TAKEN_APART)))
    return Table(
        columns=("cell", "learned", "forecast", "forecast onset", *TAKEN_APART.values()), rows=rows,
        caption="Positive cells that directional called negative, taken apart after the outcome.",
    )  # fmt: skip


def figure(records: Records) -> Any:
    """Learned share against rate, by mantissa: measured and as the directional predictor has it."""
    shown = grouped(
        (cell["m"], (cell["rate"], cell["learned"], _said(records, cell, "directional")[SIDE]))
        for cell in records["outcome"].values()
    )
    return panels.learned_shares(dict(sorted(shown.items())), POSITIVE)


ESTIMANDS = (
    *map(Estimand.of, (
        window_matches, accuracy, accuracy_by_side, progress, onset_within, onset_eligible,
        false_negatives,
    )),
    Estimand.of(false_negatives, "false-negatives-at-start", onsets=[1]),
    Estimand.of(window_matches, "directional-windows", predictors=["directional"]),
    Estimand.of(onset_within, "directional-onset", predictors=["directional"]),
    Estimand.of(against, "against-symmetric", other="symmetric"),
    Estimand.of(against, "against-monotone", other="monotone"),
)  # fmt: skip

STUDY = declared(
    __name__, own=ESTIMANDS,
    stages=(
        Stage(name="forecast", kind="prediction", cells=reference_cells, run=forecast),
        Stage(name="outcome", kind="outcome", cells=outcome_cells, run=outcome, reads=("forecast",)),
    ),
    tables={"predictors": predictors_table, "windows": windows_table, "misses": misses_table},
    figures={"midpoint": figure},
    question="Does the onset of freezing in a reference say which rates still learn on a coarse grid?",
    units="one seed, rate and mantissa; cells that share a reference are paired",
    not_claimed=(
        "a calibrated forecast of the final loss",
        "that cells which share a reference are independent",
        "anything about another testbed, or a vendor's four-bit format",
    ),
    gates=(
        gate("windows", "directional-windows >= 0.8", "the paper's rule: 4 of 5"),
        gate("onsets", "directional-onset >= 0.8", "the paper's rule: 80% within 15%"),
        gate("no-worse-than-symmetric", "against-symmetric >= 0",
            "the paper's rule; it failed there, 94.4% against 95.6%"),
        gate("no-worse-than-monotone", "against-monotone >= 0", "the paper's rule"),
        gate("tie", "against-symmetric == 0", "decides how the label is read, not which one it is"),
        gate("progress", "progress > 0",
            "the paper's integrity condition: a share of progress needs progress"),
    ),
    rules=(
        rule("no result: a reference made no progress", failed=("progress",)),
        rule("promoted", "windows", "onsets", "no-worse-than-symmetric", "no-worse-than-monotone", "tie",
            says="By a tie: directional calls as many cells right as symmetric does, where one cell less "
            "would have decided against it, as it did in the paper."),
        rule("promoted", "windows", "onsets", "no-worse-than-symmetric", "no-worse-than-monotone"),
        rule("not promoted"),
    ),
    scales=scaled(
        {"testbed": CHOSEN.json(), "width": 64, "examples": 512, "steps": 3000,
            "seeds": [2027, 2028, 2029], "mantissas": [1, 2, 3, 4, 5],
            "rates": [0.01767766952966369, 0.03535533905932738, 0.07071067811865477, 0.14142135623730953,
                0.28284271247461906, 0.5656854249492381],
            "floors": {"1": 0.4, "2": 0.2, "3": 0.1, "4": 0.05, "5": 0.025}},
        smoke={"width": 16, "examples": 64, "steps": 300, "seeds": [2027], "mantissas": [1, 3, 5],
            "rates": [0.03535533905932738, 0.28284271247461906]},
        small={"seeds": [2027]},
    ),
)  # fmt: skip


def also(records: Records) -> dict[str, float | str]:
    """Return what the paper prints beside the estimands."""
    cells, missed = records["outcome"].values(), [cell for _, cell in misses(records)]
    printed: dict[str, float | str] = {
        "frozen from the first": float(sum(cell["onset"] == 1 for cell in cells)),
        **{f"matched {p}": "{}/{}".format(*windows_matched(records, p)) for p in PREDICTORS},
        **{f"onsets {p}": f"{sum(each)}/{len(each)}" for p in TIMED for each in [_onsets(records, p)]},
    }
    if missed:
        onsets = [(_said(records, cell, "directional")["onset"], cell["onset"]) for cell in missed]
        printed["other onsets"] = float(sum(said != came for said, came in onsets))
        for key in ("learned", *list(TAKEN_APART)[1:]):
            each = [cell[key] for cell in missed]
            printed[key] = f"{min(each):.3f} to {max(each):.3f}"
    return printed


_NOTE_MISSES = "Where a run learns beyond its forecast onset, see table misses."
_NOTE_FLOORS = "The floors, which are not printed, follow from this number and the 0 of 5 windows."
_NOTE_SIDE = "The paper does not say on which side of the onset's update it takes the error."
_NOTE_GATE = (
    "A gate of ours (no better than symmetric) until the paper's rule was taken to the letter; now a number."
)
_NOTE_LARGEST = "The largest share over all updates."
row = Beside(STUDY, "app:e4, locked midpoint interpolation", units=("directional", "symmetric", "scalar"))
CLAIMS = (
    *row.each("windows matched, {}",
        {"directional": "5/5", "symmetric": "5/5", "scalar": "5/5", "monotone": "0/5"}, also, "matched {}",
        source="tab:e4-prospective", note=_NOTE_MISSES),
    *row.each("cell accuracy, {}", (0.944, 0.956, 1.0), "accuracy", source="tab:e4-prospective"),
    row("cell accuracy, monotone", 0.833, "accuracy", "monotone", source="tab:e4-prospective",
        note=_NOTE_FLOORS),
    *row.each("onsets within 15%, {}", ("51/55", "51/55", "50/55"), also, "onsets {}",
        source="tab:e4-prospective"),
    row("cell accuracy, directional, error before the onset", 0.944, "accuracy-by-side", "before",
        source="tab:e4-prospective", note=_NOTE_SIDE),
    row("cell accuracy, directional, error after the onset", 0.944, "accuracy-by-side", "after",
        source="tab:e4-prospective", note=_NOTE_SIDE),
    row("directional accuracy less symmetric", -0.012, "against-symmetric", "directional less symmetric",
        source="tab:e4-prospective", note=_NOTE_GATE),
    row("arms frozen from update 1", 35, also, "frozen from the first"),
    row("false negatives, directional", 5, "false-negatives"),
    row("of those, frozen from update 1", 5, "false-negatives-at-start"),
    row("of those, with another onset than forecast", 3, also, "other onsets"),
    row("learned share of false negatives", "0.524 to 0.596", also, "learned"),
    row("output weights that ever move, there", "not printed", also, "moved_ever_out"),
    row("coordinates that ever move, there", "0.549 to 0.565", also, "moved_ever"),
    row("coordinates that move in one update, there", "0.376 to 0.426", also, "moved_at_most",
        note=_NOTE_LARGEST),
    row("learned after the forecast onset, there", "0.166 to 0.593", also, "after_cut"),
)  # fmt: skip
