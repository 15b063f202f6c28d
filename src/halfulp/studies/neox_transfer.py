"""``neox-transfer``: four write-backs in a NeoX/Pythia-style decoder, on two grids.

The paper's last write-back bundle (appendix C, tab:neox-transfer): parallel residuals, LayerNorm, GELU,
rotary positions on a quarter of each head, untied matrices. Three targets, each on e5m2 and on e4m3@128:
the units are three targets under two conditions, not six seeds. Each has a float32 reference that **starts
from the projected codes**, as its four treatments do, and then runs in float32: nearest, stochastic, ECO
(nearest, the error fed into AdamW's first moment) and masters everywhere.

Registered: recoveries, and an RMSE of the core's forecast of at most 0.15 in every cell and 0.10 in the
mean, over all updates. The constant one passes that too (the paper: 0.051 in the mean, 0.069 at most),
which is why the paper keeps its label and reads it narrowly: policy transfer, and agreement in absolute
RMSE. The *harmonised audit*, post hoc in the paper, asks after the warmup what `modern-transfer` asks: is
there anything to forecast (e5m2: no; e4m3@128: yes), and does the directional event add anything? The paper
had not kept the symmetric and the scalar trajectories; here they are kept. Its gates are declared in
advance and decide how the label is read, never which one it is.

Not printed by the paper and chosen here: the seeds; that stochastic write-back and ECO each win back at
least half in every cell; a gap of at least 0.1 nats. The label's words are the paper's
("policy-and-reference-audit-transfer"), written as its other labels are.
"""

from __future__ import annotations

from functools import partial

from halfulp.arms import Bundle, standard
from halfulp.arms.family import PAPER_NEOX, SMALL_NEOX, SMOKE_NEOX, three_thousand
from halfulp.arms.tables import forecasts
from halfulp.studies.declared import declared

SCOPE = "core"

RUNS = Bundle(
    scales=three_thousand(SMOKE_NEOX, SMALL_NEOX, PAPER_NEOX),
    targets=(161803, 141421, 173205),
    conditions={"e5m2": {"grid": "e5m2"}, "e4m3": {"grid": "e4m3@128"}},
    arms={policy: {"policy": policy} for policy in ("rne", "sr", "eco", "master")},
    anchor="projected",
    scopes=(SCOPE, "all-2d"),
    reference="fp32-{condition}-{seed}",
    rehearse=("rne", "sr", "eco"),
)

_SHOWN = standard(RUNS, scopes=(SCOPE,))
_SHOWN["tables"] = {**_SHOWN["tables"], "harmonised audit": partial(forecasts, RUNS, warmup=False)}
STUDY = declared(__name__, RUNS, **_SHOWN)
