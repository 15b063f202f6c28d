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

from halfulp.arms import Bundle, figures, measures, tables
from halfulp.arms import native as of_native
from halfulp.arms.family import PAPER_NEOX, SMALL_NATIVE, SMOKE_NEOX, native_three_thousand
from halfulp.arms.standard import of_outcomes
from halfulp.studies.declared import declared

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
    figures={"policy-effect": partial(figures.policy_effect, RUNS, target=0.9)},
)  # fmt: skip
