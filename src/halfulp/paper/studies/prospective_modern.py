"""``prospective-modern``: do the tiles that one run's trace ranks first matter in other runs?

The paper's prospective source-to-target test (section 5, tab:prospective-modern-allocation). A float32 run of
one *source* seed sums, over its first updates and for every tile of 768 coordinates, how much gradient
times update there is (P) and how often the update would be lost (F). The tiles with the largest P get fp32
masters, up to a tenth of what masters for all would take, exactly in bytes. That mask is sealed before
anything is known of the three *target* seeds. Each target is then trained on the grid with nearest
write-back (``rne``), with masters everywhere (``master``), and with the same bytes of masters in tiles
chosen by the source's P, by its F, by the target's own P (which nobody would know in time), and by
five controls: as many tiles of every tensor as the source's P, at random places.

The rule is about the share of the gap to the float32 run that an arm wins back: the source's mask wins back
at least half, is well above the best of the source's F and the controls, and hardly below the target's own.
``eco`` is one more arm, which decides nothing: no masters, the rounding error kept in the first moment.
Masters start from the projected code, so that all arms on the grid start alike. The smaller scales have
window, end and horizon in the paper's proportions; every tensor is a whole number of tiles at every scale.
"""

from __future__ import annotations

from functools import partial

from halfulp.paper.arms import Bundle, Masked, measures, plots, tables
from halfulp.paper.arms.family import PAPER_MODERN, SMALL_MODERN, SMOKE_MODERN, at
from halfulp.paper.arms.mask_recipes import masters, recipes
from halfulp.paper.studies import _allocation as shared
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule

CONTROLS = tuple(f"control-{i}" for i in range(1, 6))
RIVALS = ("source-F", *CONTROLS)

RUNS = Bundle(
    scales={
        "smoke": at(SMOKE_MODERN, updates=10, warmup=2, eval_every=5, horizon=30),
        "small": at(SMALL_MODERN, updates=200, warmup=20, eval_every=50, horizon=600),
        "paper": at(PAPER_MODERN, updates=1000, warmup=100, eval_every=200, horizon=3000),
    },
    targets=(1249306074, 1629484925, 695340460),
    conditions={"e5m2": {"grid": "e5m2"}},
    arms={
        **{policy: {"policy": policy} for policy in ("rne", "master", "eco")},
        **masters("source", "P"), **masters("target", "P"), **masters("source", "F", *CONTROLS),
    },
    masked=Masked(
        source=58709217, window=0.6, of_source=recipes(0.1, "P", "F", controls=5), of_target=recipes(0.1, "P")
    ),
    unit="target-{seed}",
    reference="target-{seed}",
)  # fmt: skip

ESTIMANDS = (
    RUNS.estimand("gap", "final loss of rne above raw fp32, nats", measures.gap),
    *(
        RUNS.estimand(f"recovery-{name}", f"share of the gap won back by {arm}", measures.recovery, arm=arm)
        for name, arm in (("all", "master"), ("source", "source-P"), ("target", "target-P"),
                          ("freeze", "source-F"), ("eco", "eco"))
    ),
    RUNS.estimand("best-rival", "largest recovery of source-F and controls", measures.best_recovery,
        arms=list(RIVALS)),
    RUNS.estimand("above-rivals", "recovery of source-P less best-rival", measures.advantage,
        arm="source-P", over=list(RIVALS)),
    RUNS.estimand("above-target", "recovery of source-P less that of target-P", measures.advantage,
        arm="source-P", over=["target-P"]),
    RUNS.estimand("shared-tiles", "share of source-P's tiles that target-P has too",
        measures.shared_tiles, mask="P"),
    RUNS.estimand("bytes-off", "largest distance of masters held from the budget", measures.bytes_off,
        arms=["source-P", "target-P", *RIVALS]),
    RUNS.estimand("matched", "1 where the arms began as declared", measures.matched),
)  # fmt: skip

STUDY = declared(
    __name__, RUNS, own=ESTIMANDS,
    tables=tables(RUNS),
    figures={
        "recovered": partial(
            plots.recovered, RUNS, arms=("master", "eco", "target-P", "source-P", *RIVALS),
            highlight="source-P", faint=CONTROLS,
        )
    },
    question="Do the tiles that one run's gradient times update ranks first deserve masters in other runs?",
    units="one target training seed; masks, tiles and controls are not replicates",
    not_claimed=(
        "that the score is new or the best: it is one first-order signal",
        "that lost updates are unimportant in general, or that a mask holds for another model or data",
        "memory or time of a whole run: the budget counts bytes of masters",
        "anything about a population of random masks: the controls are five fixed ones",
    ),
    gates=(
        gate("material", "gap >= 0.1", "without a gap a recovery has no meaning"),
        gate("blanket", "recovery-all >= 0.9",
            "masters everywhere must win the gap back, or masters somewhere say nothing"),
        gate("source", "recovery-source >= 0.5"),
        gate("source-mean", "recovery-source >= 0.6", scope="mean"),
        gate("rivals", "above-rivals >= 0.15"),
        gate("rivals-mean", "above-rivals >= 0.25", scope="mean"),
        gate("target", "above-target >= -0.1"),
        gate("target-mean", "above-target >= -0.05", scope="mean"),
        gate("exact", "bytes-off == 0"),
        gate("matched", "matched == 1"),
    ),
    rules=(
        *shared.UNMET,
        rule("the source's mask transfers", "source", "source-mean", "rivals", "rivals-mean", "target",
            "target-mean"),
        rule("the source's mask is above its rivals, not every floor met", "rivals", "rivals-mean"),
        rule("the source's mask does not transfer"),
    ),
)  # fmt: skip

_NOTE = "162 million weights, 1000 updates; smaller scales have another model, text and horizon"
row = Beside(STUDY, "tab:prospective-modern-allocation", _NOTE,
    units=("target-1249306074", "target-1629484925", "target-695340460"))  # fmt: skip
CLAIMS = (
    row("the rule", "every gate passes", row.label, source="appendix E", note=""),
    *row.each("nearest loss gap, nats, {}", (1.159, 1.137, 1.186), "gap",
        source="tab:prospective-modern-allocation-losses"),
    *row.each("won back by the source's P, {}", (0.604, 0.61, 0.607), "recovery-source"),
    *row.each("won back by the target's own P, {}", (0.615, 0.605, 0.606), "recovery-target"),
    *row.each("won back by the best of F and the controls, {}", (0.182, 0.175, 0.179), "best-rival"),
    *row.each("won back by the source's F, {}", (0.009, 0.007, 0.007), "recovery-freeze"),
    *row.each("won back by eco, without masters, {}", ("0.964 to 0.966", "0.964 to 0.966", "0.964 to 0.966"),
        "recovery-eco", source="section 5"),
)  # fmt: skip
