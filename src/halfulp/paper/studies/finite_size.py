"""Is the majority crossing a transition that sharpens with size, or an arithmetic crossover that does not?

Students of 16 to 512 units are trained on grids of 6, 7 and 8 mantissa bits; only the input layer is looked
at (N = 8 inputs x width = 128 to 4096 coordinates). At the first step that freezes at least half of it, every
coordinate has

    z_i = log2(gap_i / (2 |d_i|))        gap_i: to the adjacent code in the direction of the proposal d_i

which is positive for a frozen coordinate and negative for one that moves (away from ties). The width of the
crossover is Q0.84(z) - Q0.16(z), in bits. A transition that sharpens would narrow as N grows; a power law
W ~ N**-a through the means over seeds describes it (a > 0: narrowing) and is no more than a description.

The same step serves to check the uniform-phase approximation of appendix A,

    f_pred = mean of clip(-log2 rho_i, 0, 1),        rho_i = |d_i| / (2**-(m+1) |q_i|)

against the frozen fraction itself. Quantiles interpolate linearly. Start and teacher are what study `testbed`
chose. Left open by the paper and chosen here: rate 0.025 at every width, seeds 43000 to 43005 (43003 is the
one seed that the paper names), at most 2,000 steps. A run that has not crossed by then leaves no width and
counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from halfulp.measures import events
from halfulp.measures.crossings import MAJORITY
from halfulp.measures.forecasts import scalar_rho_map
from halfulp.paper import panels
from halfulp.paper.models.mlp import Array, Trainer
from halfulp.paper.models.teacher import CHOSEN, INPUTS, Testbed, teacher_student
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule, scaled
from halfulp.paper.values import finite, grouped, known, less, quotient
from halfulp.study.protocol import Cell, Config, Estimand, Json, Records, Running, Stage, Table, Values

QUANTILES = (0.16, 0.50, 0.84)


def cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each width, mantissa and seed."""
    for width in config["widths"]:
        for m in config["mantissas"]:
            for seed in config["seeds"]:
                c = {"width": width, "mantissa": m, "seed": seed}
                shared = {key: config[key] for key in ("testbed", "rate", "steps", "examples")}
                yield Cell(name=f"H={width}.m{m}.seed={seed}", config={**c, **shared})


def cross(cell: Running) -> Mapping[str, Json]:
    """Train up to the first majority crossing of the input layer, and look at it."""
    c = cell.config
    testbed = Testbed.of(c["testbed"])
    p = teacher_student(c["seed"], width=c["width"], examples=c["examples"], tests=1, testbed=testbed)
    grid, layer = f"m{c['mantissa']}", p.net.part("W1")
    size = layer.stop - layer.start
    record: dict[str, Json] = {
        "width": c["width"], "mantissa": c["mantissa"], "seed": c["seed"], "size": size, "step": None,
    }  # fmt: skip
    trainer = Trainer(p.net, p.train, p.start, rate=p.factor * c["rate"], store=grid, span=layer)
    while trainer.step < c["steps"] and not trainer.diverged:
        stored = trainer.weights[layer].copy()
        frozen = int(trainer.advance(1).frozen[0])
        if frozen >= MAJORITY * size:
            return {**record, "step": trainer.step, "frozen": frozen,
                    **look(stored, trainer.proposal[layer], grid)}  # fmt: skip
    return record


def look(q: Array, d: Array, grid: str) -> dict[str, Json]:
    """Quantiles of z, and the frozen fraction that uniform phases give."""
    stored, proposal = torch.from_numpy(q), torch.from_numpy(d)
    gap = events.gap(stored, proposal, grid).numpy()
    with np.errstate(divide="ignore"):
        z = np.log2(gap / (2 * np.abs(d)))
    low, middle, high = map(finite, np.quantile(z, QUANTILES))
    rho = events.rho(stored, proposal, grid).numpy()
    uniform = float(scalar_rho_map(np.nan_to_num(rho, nan=0.0)).mean())  # no proposal: frozen
    return {"z": {"0.16": low, "0.50": middle, "0.84": high}, "uniform_phase": uniform}


# ---- estimands ------------------------------------------------------------------------------------------


def width_of(r: Mapping[str, Json]) -> float | None:
    """Q0.84 - Q0.16 of one cell."""
    return None if r["step"] is None else less(r["z"]["0.84"], r["z"]["0.16"])


def means(rows: Iterable[tuple[int, int, float | None]]) -> dict[int, dict[int, float | None]]:
    """Mean width over seeds, of (mantissa, size, width), by mantissa and size; None if a seed has none."""
    by_mantissa: dict[int, dict[int, float | None]] = {}
    for (m, n), each in grouped(((m, n), width) for m, n, width in rows).items():
        there = known(each)
        by_mantissa.setdefault(m, {})[n] = float(np.mean(there)) if len(there) == len(each) else None
    return by_mantissa


def widths(records: Records) -> dict[int, dict[int, float | None]]:
    """Mean width over seeds, by mantissa and size."""
    return means((r["mantissa"], r["size"], width_of(r)) for r in records["crossing"].values())


def mean_width(records: Records) -> Values:
    """Mean over seeds of Q0.84 - Q0.16 of z at the crossing."""
    return {f"m{m}.N={n}": w for m, by_size in widths(records).items() for n, w in by_size.items()}


def growth(records: Records) -> Values:
    """Mean width at the largest size over that at the smallest, by mantissa."""
    return {f"m{m}": quotient(w[max(w)], w[min(w)]) for m, w in widths(records).items()}


def fits(records: Records) -> dict[int, tuple[float, float] | None]:
    """(a, R**2) of W ~ N**-a by least squares of log W on log N, over the means."""
    by_mantissa: dict[int, tuple[float, float] | None] = {}
    for m, by_size in widths(records).items():
        there = [(n, w) for n, w in by_size.items() if w is not None]
        if len(there) < max(len(by_size), 2):
            by_mantissa[m] = None
            continue
        x, y = (np.log(np.array(v, float)) for v in zip(*there, strict=True))
        slope, offset = np.polyfit(x, y, 1)
        rest = float(np.square(y - slope * x - offset).sum())
        spread = float(np.square(y - y.mean()).sum())
        by_mantissa[m] = float(-slope), 1 - rest / spread if spread else 0.0
    return by_mantissa


def exponent(records: Records) -> Values:
    """A in W ~ N**-a; above zero: narrowing."""
    return {f"m{m}": None if fit is None else fit[0] for m, fit in fits(records).items()}


def phase_errors(records: Records) -> dict[str, tuple[float, int]]:
    """|f_pred - f| at the crossing and the number of coordinates, by cell."""
    return {
        name: (abs(r["uniform_phase"] - r["frozen"] / r["size"]), r["size"])
        for name, r in records["crossing"].items()
        if r["step"] is not None
    }


def phase_error(records: Records) -> Values:
    """Mean over cells of |f_pred - f| under uniform phases."""
    errors = list(phase_errors(records).values())
    return {"study": float(np.mean([e for e, _ in errors])) if errors else None}


def weighted_phase_error(records: Records) -> Values:
    """The same, weighted by coordinates."""
    errors = phase_errors(records).values()
    return {"study": quotient(sum(e * n for e, n in errors), sum(n for _, n in errors))}


def crossed(records: Records) -> Values:
    """Share of cells that crossed."""
    each = records["crossing"].values()
    return {"study": sum(r["step"] is not None for r in each) / len(each)}


# ---- reports --------------------------------------------------------------------------------------------


def table(records: Records) -> Table:
    """Mean width by size and mantissa, and the fits."""
    by_mantissa, fitted = widths(records), fits(records)
    sizes = sorted({n for by_size in by_mantissa.values() for n in by_size})
    return Table(
        columns=("grid", *(f"N = {n}" for n in sizes), "a", "R squared"),
        rows=[
            (f"m{m}", *(by_size[n] for n in sizes), *(fitted[m] or (None, None)))
            for m, by_size in by_mantissa.items()
        ],
        caption="Q0.84 - Q0.16 of z at the first majority crossing, in bits; mean over seeds.",
    )


def figure(records: Records) -> Any:
    """Width against size."""
    means = {m: [(n, w) for n, w in s.items() if w is not None] for m, s in widths(records).items()}
    sizes = ((r["mantissa"], r["size"], width_of(r)) for r in records["crossing"].values())
    each = grouped((m, (n, w)) for m, n, w in sizes if w is not None)
    return panels.widths({m: each.get(m, []) for m in means}, means)


ESTIMANDS = (
    Estimand.of(mean_width, "width"),
    *map(Estimand.of, (growth, exponent, phase_error, weighted_phase_error, crossed)),
)  # fmt: skip

STUDY = declared(
    __name__, own=ESTIMANDS,
    stages=(Stage(name="crossing", kind="outcome", cells=cells, run=cross),),
    tables={"widths": table},
    figures={"widths": figure},
    question="Does the majority crossing sharpen as the number of coordinates grows?",
    units="one width, precision and seed",
    not_claimed=(
        "a thermodynamic phase transition, or its absence beyond these sizes",
        "a scaling law: the power fits describe six points each",
    ),
    gates=(
        gate("does-not-narrow", "growth >= 1",
            "a crossover that sharpens has a smaller width at the largest size"),
        gate("no-power-of-narrowing", "exponent <= 0", "the same, from all sizes"),
        gate("uniform-phases", "phase-error <= 0.05", "what the paper calls accurate (appendix C)"),
        gate("all-crossed", "crossed == 1", "a width of survivors only would be another quantity"),
    ),
    rules=(
        rule("a crossover that does not sharpen", "does-not-narrow", "no-power-of-narrowing",
            "uniform-phases", "all-crossed"),
        rule("widths do not narrow", "does-not-narrow", "no-power-of-narrowing"),
        rule("widths narrow at some precision"),
    ),
    scales=scaled(
        {"testbed": CHOSEN.json(), "widths": [16, 32, 64, 128, 256, 512], "mantissas": [6, 7, 8],
            "seeds": [43000, 43001, 43002, 43003, 43004, 43005], "rate": 0.025, "steps": 2000,
            "examples": 512},
        smoke={"widths": [8, 32], "mantissas": [6, 8], "seeds": [43000], "steps": 200, "examples": 64},
        small={"seeds": [43000, 43003]},
    ),
)  # fmt: skip


def also(records: Records) -> dict[str, float | str]:
    """Return what the paper prints beside the estimands."""
    printed: dict[str, float | str] = {}
    for m, by_size in widths(records).items():
        small, large = by_size.get(INPUTS * 16), by_size.get(INPUTS * 512)
        if small is not None and large is not None:
            printed[f"ends m{m}"] = f"{small:.3f} to {large:.3f}"
    printed |= {f"fit m{m}": fit[1] for m, fit in fits(records).items() if fit is not None}
    errors = {name: error for name, (error, _) in phase_errors(records).items()}
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        printed["worst"] = f"{errors[worst]:.3f} ({worst})"
    return printed


_NOTE = (
    "Rate and start are not printed; the seed that the paper names is among ours, its start is not. Widths "
    "at both ends, where references cross, were among the facts that chose the testbed."
)
row = Beside(STUDY, "app:arithmetic")
CLAIMS = (
    row("width from N = 128 to 4096, m = 6", "2.811 to 4.490", also, "ends m6", note=_NOTE),
    row("width from N = 128 to 4096, m = 7", "3.267 to 4.734", also, "ends m7", note=_NOTE),
    row("width from N = 128 to 4096, m = 8", "3.426 to 4.566", also, "ends m8", note=_NOTE),
    row("exponent a of W ~ N**-a, m = 6", -0.1, "exponent", "m6", note=_NOTE),
    row("exponent a of W ~ N**-a, m = 7", -0.075, "exponent", "m7", note=_NOTE),
    row("exponent a of W ~ N**-a, m = 8", -0.069, "exponent", "m8", note=_NOTE),
    row("R squared of that fit, m = 6", 0.67, also, "fit m6", note=_NOTE),
    row("R squared of that fit, m = 7", 0.5, also, "fit m7", note=_NOTE),
    row("R squared of that fit, m = 8", 0.75, also, "fit m8", note=_NOTE),
    row("uniform phases: mean error over cells", 0.008, "phase-error"),
    row("uniform phases: error weighted by coordinates", 0.004, "weighted-phase-error"),
    row("uniform phases: worst cell", "0.090 (H=16, m=8, seed 43003)", also, "worst"),
)  # fmt: skip
