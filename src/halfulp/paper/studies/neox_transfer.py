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

from halfulp.paper.arms import Bundle, measures, standard
from halfulp.paper.arms.family import PAPER_NEOX, SMALL_NEOX, SMOKE_NEOX, three_thousand
from halfulp.paper.arms.standard import forecasts
from halfulp.paper.studies.claims import Beside, over, spread
from halfulp.paper.studies.declared import OURS, declared, gate, rule

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
ESTIMANDS = (
    RUNS.estimand("informative", "1 where V >= 0.10 and E <= 0.8 E_const after the warmup",
        measures.informative, warmup=False, scopes=["core"]),
    RUNS.estimand("late-range",
        "95th less 5th percentile of the measured frozen fraction after the warmup",
        measures.measured_range, warmup=False, scopes=["core"]),
    RUNS.estimand("late-added-value", "added-value after the warmup", measures.added_value, warmup=False,
        scopes=["core"]),
)  # fmt: skip

_INFORMATIVE = {
    condition: tuple(f"informative[{condition}-{seed} core]" for seed in RUNS.targets)
    for condition in RUNS.conditions
}

STUDY = declared(
    __name__, RUNS, own=ESTIMANDS, **_SHOWN,
    question="Do write-back policies and the reference's forecast transfer to a NeoX-style decoder?",
    units="one target seed under one of two grids; the grids share the targets",
    not_claimed=(
        "six independent seeds: three targets are paired across two grids",
        "that the forecast beats a constant wherever its RMSE is small",
        "that stochastic write-back and ECO are one policy: they are two contrasts",
        "an effect of one component, native fp8 compute, throughput or cost",
    ),
    gates=(
        gate("sr", "recovery-sr >= 0.5", f"an absolute floor in every cell; {OURS}"),
        gate("eco", "recovery-eco >= 0.5", f"an absolute floor in every cell; {OURS}"),
        gate("rmse", "rmse <= 0.15", "appendix C"),
        gate("rmse-mean", "rmse <= 0.1", "appendix C", scope="mean"),
        gate("material", "gap-rne >= 0.1", f"without a gap a recovery has no meaning; {OURS}"),
        gate("matched", "matched == 1"),
        gate("fixed-one", "rmse-one <= 0.15",
            "harmonised audit: whether the constant one passes the same gate"),
        gate("fixed-one-mean", "rmse-one <= 0.1", "harmonised audit", scope="mean"),
        gate("informative", "informative == 1", "harmonised audit: the rule of modern-transfer",
            scope="unit"),
        gate("informative-all", "informative == 1", "harmonised audit"),
        gate("added-value", "late-added-value <= 0.9", "harmonised audit; untestable in the paper"),
    ),
    rules=(
        rule("inconclusive_invalid_training", failed=("matched",), says="The arms did not match."),
        rule("inconclusive_no_material_gap", failed=("material",), says="There is no gap."),
        rule("policy_and_reference_audit_transfer", "sr", "eco", "rmse", "rmse-mean", "informative-all",
            "added-value", says="The policies transfer, and the forecast passes the harmonised audit too."),
        rule("policy_and_reference_audit_transfer", "sr", "eco", "rmse", "rmse-mean", "fixed-one",
            "fixed-one-mean", *_INFORMATIVE["e4m3"], failed=_INFORMATIVE["e5m2"],
            says="Read narrowly: the policies transfer and the forecast agrees in absolute RMSE, which the "
            "constant one reaches as well; transfer of the diagnostic is not validated. There is something "
            "to forecast on e4m3@128 and not on e5m2."),
        rule("policy_and_reference_audit_transfer", "sr", "eco", "rmse", "rmse-mean",
            says="Read narrowly: the policies transfer and the forecast agrees in absolute RMSE, which the "
            "constant one reaches as well; transfer of the diagnostic is not validated."),
        rule("policy_only_transfer", "sr", "eco", says="The policies transfer alone."),
        rule("no_policy_transfer", says="A policy does not win back half of the gap somewhere."),
    ),
)  # fmt: skip

_NOTE_SCALE = (
    "three targets on 162 million weights, 3000 updates; the paper prints means and ranges over them"
)
_NOTE_INFORMATIVE = "1 where it is, in every target"
_NOTE_ADDED_VALUE = "RMSE over the best simpler event's"
row = Beside(STUDY, "appendix C", units=("e5m2", "e4m3"))
CLAIMS = (
    row("registered label, as it is read", "policy_and_reference_audit_transfer", row.label),
    *row.each("nearest loss gap, nats, {}", ("1.721 to 1.754", "1.167 to 1.204"),
        over(spread, "gap-rne", "{}"), source="tab:neox-transfer", note=_NOTE_SCALE),
    *row.each("recovery, stochastic, {}", ("0.958 [0.948, 0.968]", "0.978 [0.967, 0.984]"),
        over(spread, "recovery-sr", "{}"), source="tab:neox-transfer", note=_NOTE_SCALE),
    *row.each("recovery, eco, {}", ("0.819 [0.809, 0.833]", "0.957 [0.955, 0.961]"),
        over(spread, "recovery-eco", "{}"), source="tab:neox-transfer", note=_NOTE_SCALE),
    *row.each("RMSE, directional, core, {}", ("0.00646 [max 0.00654]", "0.00815 [max 0.00826]"),
        over(spread, "rmse", "{}"), source="tab:neox-transfer", note=_NOTE_SCALE),
    row("RMSE of the constant one, core", "0.05134 [max 0.06940]", over(spread, "rmse-one"),
        note=_NOTE_SCALE),
    *row.each("informative after the warmup, {}", (0.0, 1.0), over(spread, "informative", "{}"),
        note=_NOTE_INFORMATIVE),
    row("directional added value after the warmup", "untestable", over(spread, "late-added-value"),
        note=_NOTE_ADDED_VALUE),
)  # fmt: skip
