"""``whole-tensor``: do whole tensors, ranked by how much of them would not move, deserve masters?

The paper's first allocator (appendix E, tab:e1-controls), kept as history. A float32 run of 600 of 3000
updates ranks tensors by the share of coordinates whose proposal is below the symmetric half-gap at *every*
one of them. Whole tensors are taken from the highest share down until they are at least a quarter, or half,
of all coordinates; the last one overshoots (0.258 and 0.715 in the paper). Beside it: from the other end
(anti-selection), the tied matrix alone, and half without the tied matrix. Five random draws of tensors a
budget are aimed at what the selection spent; they seldom hit it, so nothing is claimed against them.

Masters start from the raw weights and not from their codes, as they did there: recovery is of both.
The only clean comparison is selection against anti-selection near a quarter; the rule is about that.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.paper.arms import Bundle, Masked, measures
from halfulp.paper.arms.bundle import Unit
from halfulp.paper.arms.family import PAPER_GPT2, at, three_thousand
from halfulp.paper.studies import _allocation as shared
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import gate, rule

RAW = "tile-master(start_from=raw)"
NEAR = 0.01
"""Of all coordinates: how near a draw must come to what the selection spent, to be compared with it."""
DRAWS = {25: tuple(f"draw-{i}-25" for i in range(1, 6)), 50: tuple(f"draw-{i}-50" for i in range(1, 6))}
CHOSEN = ("select-25", "anti-25", "tied", "select-50", "without-50")

SIX_LAYERS = replace(shared.SMALL, model=replace(shared.SMALL.model, layers=6))
"""With four layers the tied matrix is 40% of all coordinates, and the last tensor of anti-selection."""

RUNS = Bundle(
    scales={
        **three_thousand(shared.SMOKE, shared.SMALL, PAPER_GPT2),
        "small": at(shared.SMALL, updates=40, warmup=2, eval_every=20),
        "medium": at(SIX_LAYERS, updates=600, warmup=20, eval_every=100),
    },
    targets=(1337, 1338),
    conditions=shared.E5M2,
    arms={
        "rne": {"policy": "rne"}, "master": {"policy": "master(start_from=raw)"},
        **shared.masters(*CHOSEN, *DRAWS[25], *DRAWS[50], policy=RAW),
    },
    rehearse=("rne",),
    masked=Masked(
        window=0.2,
        of_source={
            "select-25": {"whole": True, "share": 0.25},
            "anti-25": {"whole": True, "share": 0.25, "anti": True},
            "tied": {"only": shared.TIED},
            "select-50": {"whole": True, "share": 0.5},
            "without-50": {"whole": True, "share": 0.5, "without": shared.TIED},
            **{
                name: {"whole": True, "draw": 1000 * percent + i, "like": f"select-{percent}"}
                for percent, names in DRAWS.items() for i, name in enumerate(names)
            },
        },
    ),
    unit="seed-{seed}",
    reference="seed-{seed}",
)  # fmt: skip


def spent(unit: Unit, arm: str) -> float:
    """Masters of an arm, as a share of masters for all."""
    return float(unit.run(arm)["master_bytes"] / (4 * sum(unit.run(arm)["coordinates"].values())))


def near_draws(unit: Unit) -> float:
    """Draws that come near to what the selection of their budget spent."""
    return float(
        sum(
            abs(spent(unit, draw) - spent(unit, f"select-{percent}")) <= NEAR
            for percent, names in DRAWS.items() for draw in names
        )
    )  # fmt: skip


def won_against_draws(unit: Unit) -> float | None:
    """Near draws that the selection is above."""
    advantages = [
        measures.advantage(unit, f"select-{percent}", [draw])
        for percent, names in DRAWS.items() for draw in names
        if abs(spent(unit, draw) - spent(unit, f"select-{percent}")) <= NEAR
    ]  # fmt: skip
    return None if None in advantages else float(sum(v > 0 for v in advantages if v is not None))


STUDY = shared.study(
    __name__, RUNS,
    *(
        RUNS.estimand(f"spent-{arm}", f"masters of {arm}, as a share of masters for all", spent, arm=arm)
        for arm in CHOSEN
    ),
    shared.less(RUNS, "above-anti", "select-25", ["anti-25"]),
    RUNS.estimand("draws-near", f"draws within {NEAR} of the selection's share, of ten", near_draws),
    RUNS.estimand("draws-won", "near draws that the selection is above", won_against_draws),
    beside="select-25", highlight="select-25", faint=(*DRAWS[25], *DRAWS[50]),
    question="Do whole tensors that would move least win back more than those that would move most?",
    units="one training seed; draws of tensors are not replicates",
    not_claimed=(
        "superiority or noninferiority against random tensors: few draws spend as much",
        "that equal nominal budgets are equal: tensors are taken whole",
        "an effect of write-back alone: masters start from raw weights",
        "a separation of the tied matrix's two roles",
    ),
    gates=(
        *shared.floors(blanket=0.8),
        gate("selection", "above-anti > 0", "at about a quarter of the masters, in both seeds"),
    ),
    rules=(
        *shared.UNMET,
        rule("selection is above anti-selection", "selection",
            says="Near a quarter of the masters; nothing is said of random tensors."),
        rule("selection is not above anti-selection"),
    ),
)  # fmt: skip

_NOTE = "GPT-2 124M; the small scale is 1.3 million weights"
row = Beside(STUDY, "tab:e1-controls", _NOTE, units=("seed-1337", "seed-1338"))
CLAIMS = (
    row("the comparison", "selection is above anti-selection", row.label, source="appendix E", note=""),
    *row.each("won back by masters everywhere, {}", (1.005, 1.001), "recovery-master"),
    *row.each("masters of select-25, {}", (0.258, 0.262), "spent-select-25"),
    *row.each("masters of anti-25, {}", (0.266, 0.266), "spent-anti-25"),
    *row.each("masters of tied, {}", (0.311, 0.311), "spent-tied"),
    *row.each("masters of select-50, {}", (0.715, 0.715), "spent-select-50"),
    *row.each("masters of without-50, {}", (0.504, 0.504), "spent-without-50"),
    *row.each("won back by select-25, {}", (0.274, 0.273), "recovery-select-25"),
    *row.each("won back by anti-25, {}", (0.082, 0.078), "recovery-anti-25"),
    *row.each("won back by tied, {}", (0.559, 0.552), "recovery-tied"),
    *row.each("won back by select-50, {}", (1.01, 1.003), "recovery-select-50"),
    *row.each("won back by without-50, {}", (0.309, 0.291), "recovery-without-50"),
    *row.each("random draws near the selection's share, {}", ("8 of 20, both seeds", "8 of 20, both seeds"),
        "draws-near", source="appendix E"),
    *row.each("of these, the selection is above, {}", ("6 of 8, both seeds", "6 of 8, both seeds"),
        "draws-won", source="appendix E"),
)  # fmt: skip
