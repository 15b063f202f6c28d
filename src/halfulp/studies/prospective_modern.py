"""``prospective-modern``: do the tiles that one run's trace ranks first matter in other runs?

The paper's prospective source-to-target test (section 5, tab:prospective-modern-allocation). A float32 run of
one *source* seed sums, over its first updates and for every tile of 768 coordinates, how much gradient
times update there is (P) and how often the update would be lost (F). The tiles with the largest P get fp32
masters, up to a tenth of what masters for all would take, exactly in bytes. That mask is sealed before
anything is known of the three *target* seeds. Each target is then trained on the grid with nearest
write-back (``rne``), with masters everywhere (``master``), and with the same bytes of masters in tiles
chosen by the source's P, by its F, by the target's own P (which nobody would know in time), and by
five controls: as many tiles of every tensor as the source's P, at random places. With L the held-out loss
after the last update,

    R(arm) = (L_rne - L_arm) / (L_rne - L_fp32)

is the share of the gap that an arm wins back, against the float32 run of the same target from its raw start.
The rule, as in the paper: the source's mask wins back at least half, is well above the best of the source's
F and the controls, and hardly below the target's own.

``eco`` is one more arm, which decides nothing: no masters, the rounding error kept in the first moment.
Masters start from the projected code, so that all arms on the grid start alike.

The smaller scales have a smaller decoder of the same kind, other text, and fewer updates, with window, end
and horizon in the paper's proportions; every tensor is a whole number of tiles at every scale.
"""

from __future__ import annotations

from functools import partial

from halfulp.arms import Bundle, Masked, figures, tables
from halfulp.arms.family import PAPER_MODERN, SMALL_MODERN, SMOKE_MODERN, at
from halfulp.arms.masks import masters, recipes
from halfulp.studies.declared import declared

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

STUDY = declared(
    __name__, RUNS,
    tables=tables(RUNS),
    figures={
        "recovered": partial(
            figures.recovered, RUNS, arms=("master", "eco", "target-P", "source-P", *RIVALS),
            highlight="source-P", faint=CONTROLS,
        )
    },
)  # fmt: skip
