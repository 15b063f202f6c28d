"""``template-challenge``: was it the source, or what all runs share over time?

The paper's secondary analysis of `source-amortized` (section 4.2, appendix C, tab:source-template).
Evidence: three archived targets of `neox-transfer` on e4m3@128, and the sealed records of
`source-amortized`. For the frozen fraction of the core after the warmup, with S the source and j a target,

    B_Y   mean of the three archived nearest trajectories: a template, which knows nothing of S or j
    B_X   mean of the three archived float32 trajectories (of their directional event)
    X_S   the source's forecast                 H_S = X_S + B_Y - B_X
    X_M   the target's own float32 reference    H_M = X_M + B_Y - B_X, both privileged

No target prefix, calibration, smoothing, lag or weighting. All six are computed and sealed before a
target's nearest run is opened: the evidence that holds those runs stays closed until then, and a cell that
asks for it is refused. The runs exist already, so this is an analysis that did not see its outcome, not one
made before it.

Gates say which order holds in every target; the paper registers none for it, and none changes a gate of
`source-amortized`. The decomposition of the outcomes (what all targets share over time, a level of each,
the rest) and the correlations are descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from halfulp.drawing import COLOURS, DASHES, GREY, new_figure, percent
from halfulp.measures.forecasts import compare
from halfulp.paper.arms import records
from halfulp.paper.studies import neox_transfer, source_amortized
from halfulp.paper.studies.claims import Beside, average, ends, over
from halfulp.paper.studies.declared import declared, gate, rule
from halfulp.study.protocol import (
    Cell,
    Config,
    Estimand,
    Evidence,
    Json,
    Records,
    Running,
    Stage,
    Table,
    Values,
)  # fmt: skip

GRID, SCOPE = "e4m3@128", "core"
PREDICTORS = {
    "B_Y": "archived outcome template", "B_X": "archived float32 template", "X_S": "reused source",
    "H_S": "source hybrid", "X_M": "matched float32", "H_M": "matched hybrid",
}  # fmt: skip
COMPARED = ("B_Y", "X_S", "H_S", "X_M", "H_M")
ALL = "all targets"
PARTS = {"RMSE": "rmse", "centred RMSE": "centred_rmse", "signed error": "signed_error"}

_ARCHIVE, _AUDIT = neox_transfer.RUNS, source_amortized.RUNS
_ARCHIVED = tuple(unit for unit, (condition, _) in _ARCHIVE.units.items() if condition == "e4m3")
_CONFIG: Config = {"archived": list(_ARCHIVED), "targets": list(_AUDIT.units), "scope": SCOPE, "grid": GRID}


def targets(config: Config) -> Iterator[Cell]:
    """Yield a cell for every target."""
    shared = {key: config[key] for key in ("archived", "scope", "grid")}
    for target in config["targets"]:
        yield Cell(name=target, config={"target": target, **shared})


def predict(running: Running) -> dict[str, Json]:
    """Return all six predictors of a target, from records that were there before its outcome was opened."""
    config = running.config
    archive, audit = running.evidence("archive"), running.evidence("references")

    def core(record: Mapping[str, Json]) -> records.Array:
        return records.frozen(record, config["grid"], config["scope"])

    nearest, float32 = (
        [core(archive[stage][cell(unit)]) for unit in config["archived"]]
        for stage, cell in (
            ("outcome", partial(_ARCHIVE.cell, arm="rne")),
            ("reference", _ARCHIVE.reference_of),
        )
    )
    template, base = np.mean(nearest, axis=0), np.mean(float32, axis=0)
    source = np.asarray(audit["forecast"]["source"]["frozen"][config["scope"]])
    matched = core(audit["reference"][config["target"]])
    predictors = {"B_Y": template, "B_X": base, "X_S": source, "H_S": source + template - base}
    predictors |= {"X_M": matched, "H_M": matched + template - base}
    return {name: series.tolist() for name, series in predictors.items()}


def open_outcome(running: Running) -> dict[str, Json]:
    """Return what a target's nearest run measured, and whether its reference drew the same weights."""
    target = running.config["target"]
    outcome, reference = (
        running.evidence("outcomes")["outcome"][target],
        running.evidence("references")["reference"],
    )
    measured = records.frozen(outcome, running.config["grid"], running.config["scope"])
    same = outcome["initial"] == reference[target]["initial"]
    return {"measured": measured.tolist(), "warmup": outcome["warmup"], "matched": same}


# ---- what is computed of them ---------------------------------------------------------------------------


def error(records: Records, predictor: str, part: str) -> Values:
    """RMSE, centred RMSE or signed error of a predictor after the warmup, by target."""
    return _errors(records, predictor, part)


def _errors(records: Records, predictor: str, part: str = "rmse") -> dict[str, float]:
    said = {target: series[predictor] for target, series in records["predictors"].items()}
    return {
        target: getattr(compare(said[target], seen["measured"], warmup=seen["warmup"]), part)
        for target, seen in records["opened"].items()
    }


def ratio(records: Records, predictor: str, over: str) -> Values:
    """RMSE of one predictor over that of another, by target."""
    ours, theirs = _errors(records, predictor), _errors(records, over)
    return {target: ours[target] / theirs[target] if theirs[target] else None for target in ours}


def squares(records: Records, predictor: str, over: str) -> Values:
    """Sum of squared errors of one predictor over that of another, all targets together, less one."""
    ours, theirs = (sum(e * e for e in _errors(records, p).values()) for p in (predictor, over))
    return {ALL: ours / theirs - 1 if theirs else None}


def _mean(records: Records, predictor: str, part: str) -> float:
    return float(np.mean(list(_errors(records, predictor, part).values())))


def _late(outcomes: Records) -> records.Array:
    """Return what was measured after the warmup, one row per target."""
    return np.array([seen["measured"][seen["warmup"] :] for seen in outcomes["opened"].values()])


def share(records: Records, part: str) -> Values:
    """The share of the outcomes' sum of squares that is common over time, a target's level, or the rest."""
    return {ALL: time_effect(_late(records))[part]}


def time_effect(y: records.Array) -> dict[str, float]:
    """Split trajectories, a row a target, by means: y[j, t] = mean + offset[j] + common[t] + residual[j, t].

    The parts are orthogonal, so their shares of the sum of squares about the mean add up to one.

    >>> curve = np.array([0.1, 0.2, 0.6])
    >>> time_effect(np.array([curve, curve + 0.5]))["residual"] < 1e-30
    True
    """
    mean, by_target, by_time = y.mean(), y.mean(axis=1, keepdims=True), y.mean(axis=0, keepdims=True)
    total = float(np.square(y - mean).sum())
    return {
        "common": y.shape[0] * float(np.square(by_time - mean).sum()) / total,
        "offset": y.shape[1] * float(np.square(by_target - mean).sum()) / total,
        "residual": float(np.square(y - by_target - by_time + mean).sum()) / total,
    }


def template_correlation(records: Records) -> Values:
    """Of the mean outcome with the archived template."""
    first = next(iter(records["opened"]))
    template = np.asarray(records["predictors"][first]["B_Y"])[records["opened"][first]["warmup"] :]
    return {ALL: _correlation(_late(records).mean(axis=0), template)}


def deviation_correlation(records: Records) -> Values:
    """Of a target's own deviation over time with its reference's, each about the mean of all targets."""
    said = np.array(
        [records["predictors"][t]["X_M"][seen["warmup"] :] for t, seen in records["opened"].items()]
    )
    ours, theirs = (_deviations(table) for table in (_late(records), said))
    return {t: _correlation(ours[i], theirs[i]) for i, t in enumerate(records["opened"])}


def _deviations(table: records.Array) -> records.Array:
    """Subtract from rows their levels and what they share over time."""
    centred = table - table.mean(axis=1, keepdims=True)
    return np.asarray(centred - centred.mean(axis=0, keepdims=True))


def _correlation(x: records.Array, y: records.Array) -> float | None:
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else None


def matched(records: Records) -> Values:
    """1 where reference and outcome of a target drew the same weights."""
    return {target: float(seen["matched"]) for target, seen in records["opened"].items()}


# ---- what is shown --------------------------------------------------------------------------------------


def predictors(records: Records) -> Table:
    """Means over the targets, as the paper prints them."""
    base = _mean(records, "B_Y", "rmse")
    rows: list[Sequence[str | float | None]] = [
        (p, PREDICTORS[p], *(_mean(records, p, part) for part in PARTS.values()),
         _mean(records, p, "rmse") - base)
        for p in PREDICTORS
    ]  # fmt: skip
    return Table(
        columns=("predictor", "", "RMSE", "centred RMSE", "signed error", "RMSE less B_Y's"), rows=rows,
        caption="Equal-weight means of the targets' errors after the warmup; M: privileged.",
    )  # fmt: skip


def by_target(records: Records) -> Table:
    """The same by target, beside a constant one and the best constant."""
    rows: list[Sequence[str | float | None]] = []
    for target, seen in records["opened"].items():
        c = compare(seen["measured"], seen["measured"], warmup=seen["warmup"])
        rmse = [_errors(records, p)[target] for p in PREDICTORS]
        rows.append((target, c.measured_range, *rmse, c.constant_rmse, c.fixed_one_rmse))
    return Table(
        columns=("target", "range", *PREDICTORS, "best constant", "fixed one"), rows=rows,
        caption="RMSE after the warmup. Range: 95th less 5th percentile of the measured one.",
    )  # fmt: skip


def decomposition(records: Records) -> Table:
    """Tabulate what the outcomes have in common."""
    rows: list[Sequence[str | float | None]] = [
        (what, share(records, part)[ALL])
        for what, part in (("common over time", "common"), ("level of a target", "offset"),
                           ("target by time", "residual"))
    ]  # fmt: skip
    rows.append(("correlation of the mean outcome with B_Y", template_correlation(records)[ALL]))
    rows += [(f"correlation of own deviations, {t}", v) for t, v in deviation_correlation(records).items()]
    return Table(
        columns=("of the measured trajectories", "value"),
        rows=rows,
        caption="A description: a large common share does not say that the schedule causes it.",
    )


def figure(records: Records) -> Any:
    """Mean trajectories of outcome and predictors, and their errors by target."""
    drawn, (curves, errors) = new_figure(1, 2)
    seen = records["opened"]
    first = next(iter(seen.values()))["warmup"]
    measured = np.mean([s["measured"] for s in seen.values()], axis=0)
    at = range(first + 1, len(measured) + 1)
    curves.plot(at, measured[first:], color=COLOURS[1], label="measured, mean")
    for predictor, colour, dash in zip(("B_Y", "X_S", "H_S"), COLOURS[2:], DASHES[1:], strict=False):
        said = np.mean([records["predictors"][t][predictor] for t in seen], axis=0)
        curves.plot(at, said[first:], color=colour, linestyle=dash, label=predictor)
    curves.set_xlabel("update")
    curves.set_ylabel(f"updates lost, {SCOPE}")
    curves.legend()
    percent(curves, full=False)
    for place, predictor in enumerate(COMPARED):
        values = list(_errors(records, predictor).values())
        errors.plot([place] * len(values), values, "o", color=COLOURS[0] if predictor[0] != "B" else GREY)
    errors.set_xticks(range(len(COMPARED)), COMPARED)
    errors.set_ylabel("RMSE, a dot a target")
    errors.set_ylim(bottom=0)
    return drawn


# ---- the study ------------------------------------------------------------------------------------------

STUDY = declared(
    __name__,
    scales=dict.fromkeys(_AUDIT.configs, _CONFIG),
    evidence=(
        Evidence(
            name="archive", study="neox-transfer",
            records=("outcome/e4m3-*-rne", "reference/fp32-e4m3-*"),
        ),
        Evidence(name="references", study="source-amortized", records=("forecast/*", "reference/*")),
        Evidence(name="outcomes", study="source-amortized", records=("outcome/*",), after="predictors"),
    ),
    stages=(
        Stage(name="predictors", kind="prediction", cells=targets, run=predict),
        Stage(name="opened", kind="outcome", cells=targets, run=open_outcome),
    ),
    estimands=(
        *(
            Estimand(name=f"{part.replace('_', '-')}-{p}", what=f"{what} of {PREDICTORS[p]}", compute=error,
                     args={"predictor": p, "part": part})
            for what, part in PARTS.items()
            for p in PREDICTORS
        ),
        *(
            Estimand(name=f"{a}-over-{b}", what=f"RMSE of {a} over that of {b}", compute=ratio,
                     args={"predictor": a, "over": b})
            for a, b in (("B_Y", "H_S"), ("H_S", "X_S"), ("B_Y", "X_S"), ("H_M", "B_Y"))
        ),
        *(
            Estimand(name=f"squares-{p}", what=f"sum of squared errors of {p} over B_Y's, less one",
                     compute=squares, args={"predictor": p, "over": "B_Y"})
            for p in ("H_S", "H_M")
        ),
        *(
            Estimand(name=f"share-{part}", what=f"share of the sum of squares: {what}", compute=share,
                     args={"part": part})
            for part, what in (("common", "common over time"), ("residual", "target by time"))
        ),
        Estimand(name="template-correlation", what="of the mean outcome with B_Y",
                 compute=template_correlation),
        Estimand(name="deviation-correlation", what="of own deviations, outcome and reference",
                 compute=deviation_correlation),
        Estimand(name="matched", what="1 where reference and outcome drew the same weights", compute=matched),
    ),
    tables={"predictors": predictors, "by target": by_target, "decomposition": decomposition},
    figures={"template": figure},
    question="Does a fresh source forecast what an archived outcome template does not?",
    units="one target training seed; updates are not replicates",
    not_claimed=(
        "a gate of source-amortized: none is changed",
        "that this was planned before the outcomes existed: they did, and were closed",
        "that the schedule causes what all runs share over time",
        "anything about a population of seeds: archive and targets are three fixed seeds each",
    ),
    gates=(
        gate("template-below-hybrid", "B_Y-over-H_S < 1", "an order, in every target"),
        gate("hybrid-below-source", "H_S-over-X_S < 1", "an order, in every target"),
        gate("template-below-source", "B_Y-over-X_S < 1", "an order, in every target"),
        gate("matched-below-template", "H_M-over-B_Y < 1", "an order, in every target"),
        gate("matched", "matched == 1"),
    ),
    rules=(
        rule("not matched", failed=("matched",)),
        rule("B_Y < H_S < X_S in every target", "template-below-hybrid", "hybrid-below-source",
            says="The archived template beats the fresh source, corrected or not."),
        rule("B_Y < X_S in every target", "template-below-source",
            says="The archived template beats the fresh source; its correction is elsewhere."),
        rule("the template does not beat the source in every target"),
    ),
)  # fmt: skip

_PRINTED = (
    ("B_Y", 0.003599, 0.003585, 0.000144), ("X_S", 0.00858, 0.005207, -0.006818),
    ("H_S", 0.004379, 0.00437, 2.8e-05), ("X_M", 0.007764, 0.003914, -0.006699),
    ("H_M", 0.002829, 0.002806, 0.000147),
)  # fmt: skip
"""By predictor: RMSE, centred RMSE and signed error."""
row = Beside(STUDY, "tab:source-template")
CLAIMS = (
    *(
        row(f"{what} of {predictor}, mean of targets", printed, over(average, f"{name}-{predictor}"))
        for predictor, *each in _PRINTED
        for what, name, printed in zip(PARTS, ("rmse", "centred-rmse", "signed-error"), each, strict=True)
    ),
    row("squared error of H_M over B_Y's, less one", -0.381, "squares-H_M", "all targets",
        source="appendix C"),
    row("squared error of H_S over B_Y's, less one", 0.481, "squares-H_S", "all targets",
        source="appendix C"),
    row("share of variation common over time", 0.9965, "share-common", "all targets", source="appendix C"),
    row("share of variation, target by time", 0.00346, "share-residual", "all targets", source="appendix C"),
    row("correlation of the mean outcome with B_Y", 0.99815, "template-correlation", "all targets",
        source="appendix C"),
    row("correlation of own deviations with the reference's", "0.669 to 0.712",
        over(ends, "deviation-correlation"), source="appendix C"),
)  # fmt: skip
