"""``phase-edge``: how often do six seeds give the windows that the paper prints?

In `phase-diagram` a rate is in the window of a mantissa when the median of six seeds has learned at least
half, and our windows have one rate more than the paper's (tab:e4-window): at rate x 2^m = 0.4 our six seeds
have a median just above one half, and the paper's just below it, but for one bit, whose 0.5195 is above. Is
that the testbed, or the draw of seeds? Here thirty fresh seeds train at both rates of every window's edge,
rate x 2^m = 0.4 and 0.8, on a nearest grid. Of all 593,775 draws of six of them, the share whose medians lie
where the paper's do is the answer, for each mantissa and for all five at once (a draw has the same seeds for
all of them, as the paper's has).

What was known before: a trial with 28 other seeds at 0.4 (median 0.43, single ones 0.12 to 0.78, the paper's
side in about three draws of four), and the six seeds of `phase-diagram`. So this is no blind test of the
testbed; its seeds are used by no other study.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median

import numpy as np

from halfulp.paper.models.learning_forecasts import LEARNED
from halfulp.paper.models.teacher import CHOSEN
from halfulp.paper.studies import phase_diagram as diagram
from halfulp.paper.studies.claims import Beside, over
from halfulp.paper.studies.declared import OURS, declared, gate, rule, scaled
from halfulp.study.protocol import Cell, Config, Estimand, Records, Stage, Table, Values

SIDES = (0.4, 0.8)
"""Rate x 2^mantissa on both sides of the paper's edge: outside the window, but for one bit, and inside."""
DRAWN = 6


def arm_cells(config: Config) -> Iterator[Cell]:
    """Yield the nearest arm of each seed and mantissa on both sides of the edge."""
    shared = {key: config[key] for key in ("testbed", "width", "examples", "steps")}
    for m in config["mantissas"]:
        for rate, seed in itertools.product((x / 2**m for x in SIDES), config["seeds"]):
            given = {**shared, "rate": rate, "seed": seed, "mantissa": m, "only": ["nearest"]}
            yield Cell(name=f"rate={rate}.seed={seed}.m{m}", config=given)


def reference_cells(config: Config) -> Iterator[Cell]:
    """Yield the reference of each rate and seed, audited for the mantissas that are run at that rate."""
    cells: dict[str, Cell] = {}
    for cell in arm_cells(config):
        given = dict(cell.config)
        name, m = cell.name.rpartition(".")[0], given.pop("mantissa")
        so_far = cells[name].config["mantissas"] if name in cells else []
        given.pop("only")
        cells[name] = Cell(name=name, config={**given, "mantissas": [*so_far, m]})
    yield from cells.values()


# ---- what is computed -------------------------------------------------------------------------------------


def by_edge(records: Records, arm: str = "nearest") -> dict[tuple[int, float], list[float]]:
    """Learned shares of all seeds by mantissa and side; what has diverged has learned nothing."""
    shares = diagram.shares(records, arm)
    return {(m, round(rate * 2**m, 6)): [v or 0.0 for v in each] for (m, rate), each in shares.items()}


def median_of_all(records: Records, side: float, arm: str = "nearest") -> Values:
    """Median learned share over all seeds on one side of the edge."""
    return {f"m{m}": median(each) for (m, x), each in by_edge(records, arm).items() if x == side}


def draws(seeds: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """All draws of six of some seeds, a row each."""
    return np.array(list(itertools.combinations(range(seeds), DRAWN)))


def on_the_papers_side(records: Records) -> dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """By mantissa: which draws of six have medians that put both rates where the paper's window has them."""
    learned = by_edge(records)
    drawn = draws(len(next(iter(learned.values()))))
    by_mantissa = {}
    for m in sorted({m for m, _ in learned}):
        low, high = (np.median(np.array(learned[m, x])[drawn], axis=1) >= LEARNED for x in SIDES)
        by_mantissa[f"m{m}"] = high & (low if m == 1 else ~low)
    return by_mantissa


def share_of_draws(records: Records) -> Values:
    """Share of all draws of six seeds whose medians lie on the paper's sides, by mantissa."""
    return {name: float(each.mean()) for name, each in on_the_papers_side(records).items()}


def share_of_all(records: Records) -> Values:
    """Share of draws of six seeds that have all of the paper's windows at once."""
    return {"study": float(np.all(list(on_the_papers_side(records).values()), axis=0).mean())}


def single(records: Records) -> Values:
    """Least and largest share that a single seed learned at 0.4, over all mantissas."""
    each = [v for (_, x), values in by_edge(records).items() for v in values if x == SIDES[0]]
    return {"least": min(each), "most": max(each)}


def table(records: Records) -> Table:
    """Tabulate the spread over seeds on both sides, and how often six of them agree with the paper."""
    learned, shares = by_edge(records), share_of_draws(records)
    rows = [
        (f"m{m}", f"{x:g}", *(float(q) for q in np.quantile(each, (0, 0.25, 0.5, 0.75, 1))), shares[f"m{m}"])
        for (m, x), each in sorted(learned.items())
    ]
    return Table(
        columns=("mantissa bits", "rate x 2^m", "least", "lower quartile", "median", "upper quartile", "most",
                 "draws of six as in the paper"), rows=rows,
        caption="Share of the reference's progress that a run on the grid makes, over the seeds.",
    )  # fmt: skip


STUDY = declared(
    __name__,
    own=(
        Estimand.of(median_of_all, "median-outside", side=SIDES[0]),
        Estimand.of(median_of_all, "median-inside", side=SIDES[1]),
        Estimand.of(median_of_all, "forecast-outside", side=SIDES[0], arm="forecast"),
        *map(Estimand.of, (share_of_draws, share_of_all, single)),
    ),
    stages=(
        Stage(name="reference", kind="prediction", cells=reference_cells, run=diagram.reference),
        Stage(name="arms", kind="outcome", cells=arm_cells, run=diagram.arms),
    ),
    tables={"edges": table},
    question="How often do six seeds give the windows of learning that the paper prints?",
    units="one seed; mantissas share seeds, so a draw of six is one draw for all of them",
    not_claimed=(
        "that the paper's six seeds are a draw of ours",
        "anything about rates that are not at an edge",
        "a blind test: a trial with other seeds was seen before",
    ),
    gates=(
        gate("inside", "median-inside >= 0.5", "all windows of the paper hold rate x 2^m = 0.8"),
        gate("likely", "share-of-draws >= 0.5", f"more draws than not; {OURS}", scope="unit"),
        gate("likely-all", "share-of-draws >= 0.5", f"in every mantissa; {OURS}"),
    ),
    rules=(
        rule("the inner side of the edge is another", failed=("inside",)),
        rule("six seeds give each of the paper's windows more often than not", "likely-all"),
        rule("six seeds give some of the paper's windows less often than not"),
    ),
    scales=scaled(
        {"testbed": CHOSEN.json(), "seeds": list(range(51000, 51030)), "mantissas": [1, 2, 3, 4, 5],
            "width": 64, "examples": 512, "steps": 3000},
        smoke={"seeds": list(range(51000, 51007)), "mantissas": [1, 3], "width": 8, "examples": 64,
            "steps": 60},
        small={"seeds": list(range(51000, 51010))},
    ),
)  # fmt: skip

row = Beside(STUDY, "tab:e4-window")
_NOTE = "The paper has six seeds; ours are the median of thirty, and the share of draws of six of them."
CLAIMS = (
    row("learned at rate x 2^m = 0.4, m = 1, median", 0.5195, "median-outside", "m1", source="app:e4",
        note=_NOTE),
    row("the same, m = 2 to 5", "below 0.5", over(max, "median-outside", "m2", "m3", "m4", "m5"), note=_NOTE),
    row("learned at rate x 2^m = 0.8, every m", "at least 0.5", over(min, "median-inside"), note=_NOTE),
    row("draws of six seeds with the paper's window, by m", "the paper's draw is one",
        over(lambda each: ", ".join(f"{v:.2f}" for v in each), "share-of-draws"), note=_NOTE),
    row("draws of six seeds with all five windows", "the paper's draw is one", "share-of-all", note=_NOTE),
)  # fmt: skip
