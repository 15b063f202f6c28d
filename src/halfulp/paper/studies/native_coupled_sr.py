"""``native-coupled-sr``: does stochastic rounding of lost updates alone recover what all of it recovers?

The paper's Study 2 (section 4.4). Three targets, four arms each: float32, and on persistent E4M3 codes with
native products nearest write-back (``rne``), stochastic (``sr``), and stochastic only where the nearest code
would throw a proposal away (``deadzone-sr``). All arms of a target start from the same projected codes; both
stochastic ones draw the same bits for the same weight at the same update. With R the share of the nearest
arm's gap to float32 that an arm wins back, the registered metric is R(deadzone-sr) / R(sr).

The label says "mediates", as the paper's does: it is the name of a rule, not a causal estimate.

Not printed by the paper and chosen here: the seeds, used by no other study; 0.9 for recovery and ratio, in
every target; a gap of 0.1 and a fall of one nat; the float8 recipe of activations and gradients.
"""

from __future__ import annotations

from functools import partial

from halfulp.paper.arms import Bundle, measures, plots, tables
from halfulp.paper.arms import native_measures as of_native
from halfulp.paper.arms.family import PAPER_NEOX, SMALL_NATIVE, SMOKE_NEOX, native_three_thousand
from halfulp.paper.arms.standard import of_outcomes
from halfulp.paper.studies.claims import Beside, average, over
from halfulp.paper.studies.declared import OURS, declared, gate, invalid, rule

NATIVE = ("rne", "sr", "deadzone-sr")

RUNS = Bundle(
    scales=native_three_thousand(SMOKE_NEOX, SMALL_NATIVE, PAPER_NEOX, tables=False),
    targets=(137035, 667430, 160217),
    conditions={"e4m3": {"grid": "e4m3@128"}},
    arms={policy: {"policy": policy, "storage": "native"} for policy in NATIVE},
    anchor="projected",
    unit="target-{seed}",
    reference="target-{seed}",
)

_EVERY = ["fp32", *NATIVE]

STUDY = declared(
    __name__,
    RUNS,
    estimands=(
        *of_outcomes(RUNS),
        *(
            RUNS.estimand(name, what, measure, **args)
            for name, what, measure, args in (
                ("progress", "fall of the anchor's held-out loss, nats", measures.progress, {}),
                ("ratio", "recovery of deadzone-sr over that of sr", of_native.improvement_ratio,
                 {"arm": "deadzone-sr", "over": "sr"}),
                ("dispatched", "1 where profiled updates ran natively", of_native.dispatched,
                 {"arms": list(NATIVE)}),
                ("replayed", "1 where start and end replay from files", of_native.replayed, {"arms": _EVERY}),
                ("coupled", "1 where both stochastic arms draw the same bits", of_native.coupled,
                 {"arms": ["sr", "deadzone-sr"]}),
            )
        ),
    ),
    tables=tables(RUNS),
    figures={"policy-effect": partial(plots.policy_effect, RUNS, target=0.9)},
    question=(
        "Does stochastic rounding of lost updates alone recover what full stochastic rounding does, on "
        "native weights?"
    ),
    units="one target training seed; arms, streams and evaluations are not replicates",
    not_claimed=(
        "causal mediation: the ratio is a metric of fixed runs",
        "hardware stochastic rounding: the bits are made in software",
        "anything about a population of seeds or streams",
        "speed or memory of a GPU: where there are no float8 units products are emulated exactly",
    ),
    gates=(
        gate("dispatch", "dispatched == 1", "native products in the raw trace, or the arm is not native"),
        gate("replay", "replayed == 1", "start and end from their files"),
        gate("coupled", "coupled == 1"),
        gate("matched", "matched == 1", "one start for all arms of a target"),
        gate("learning", "progress >= 1", OURS),
        gate("material", "gap-rne > 0.1", "without a gap a recovery has no meaning"),
        gate("recovered", "recovery-sr >= 0.9", f"the rule of the matched runs; {OURS}"),
        gate("mediated", "ratio >= 0.9", OURS),
    ),
    rules=(
        *invalid("inconclusive_invalid_native_intervention",
            dispatch="An arm that was to be native was not.", replay="A saved state does not replay.",
            coupled="The stochastic arms are not coupled.", matched="The arms did not begin alike.",
            learning="The training is not valid."),
        rule("no material gap", failed=("material",)),
        rule("native_deadzone_mediates_full_sr_recovery", "recovered", "mediated",
            says="Rounding lost updates at random, and nothing else, recovers as much as full stochastic "
            "rounding."),
        rule("native_full_sr_recovers_without_deadzone_mediation", "recovered",
            says="Full stochastic rounding recovers, that of lost updates alone does less."),
        rule("native_full_sr_recovery_not_supported",
            says="Full stochastic rounding does not win back 90% in every target."),
    ),
)  # fmt: skip

_NOTE = (
    "162 million weights, 3000 updates, targets in the paper's order; smaller scales have another model, "
    "text and horizon"
)
row = Beside(STUDY, "section 4.4", _NOTE, units=("target-137035", "target-667430", "target-160217"))
CLAIMS = (
    row("registered label", "native_deadzone_mediates_full_sr_recovery", row.label, note=""),
    *row.each("recovery, full stochastic, {}", (0.9862, 0.9743, 0.9694), "recovery-sr"),
    *row.each("recovery, dead zone only, {}", (0.9764, 0.9949, 0.9619), "recovery-deadzone-sr"),
    *row.each("dead zone over full, {}", (0.9901, 1.0212, 0.9923), "ratio"),
    row("dead zone over full, mean", 1.0012, over(average, "ratio")),
    row("native products in every profiled update", "in all native arms", over(min, "dispatched")),
)  # fmt: skip
