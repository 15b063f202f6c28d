"""``modern-transfer``: does the policy effect, and does the forecast, hold in another architecture?

The paper's fixed-design test (appendix C, tab:modern-transfer and tab:modern-forecast): a decoder with
RMSNorm, rotary positions, SwiGLU and untied matrices, on e5m2, two seeds. Nearest and stochastic arms start
from the same projected codes and differ in what is written after an update; the float32 anchor starts from
the raw weights and is the reference, whose forecast is sealed before any outcome. Scopes, both primary:
``core`` (attention and SwiGLU, weighted by coordinates) and ``all-2d``; updates after the warmup. With E
the RMSE and V the measured range (95th less 5th percentile), in both seeds and both scopes,

    accurate       E <= 0.05
    informative    V >= 0.10 and E <= 0.8 E_const, the best constant in hindsight
    added value    E <= 0.9 min(E_symmetric, E_rho)

A forecast may be accurate because there is nothing to forecast. Then the policy transfers and the
diagnostic does not: the paper's registered ``policy_only_transfer``.

Gates that the paper names without a number, and what was chosen: the reference's loss falls by at least one
nat; the gap of nearest is at least 0.1 nats; 90% are won back; nearest leaves at least a quarter of the
coordinates more unmoved than stochastic write-back in both scopes; no code is ever at the range's ends.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.measures.forecasts import RECOVERED
from halfulp.paper.arms import Bundle, measures, standard
from halfulp.paper.arms.family import PAPER_MODERN, SMALL_MODERN, SMOKE_MODERN, three_thousand
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import OURS, declared, gate, invalid, rule

SCOPES = ("core", "all-2d")

_PAPER = replace(PAPER_MODERN, recipe=replace(PAPER_MODERN.recipe, eval_contexts=128))

RUNS = Bundle(
    scales=three_thousand(SMOKE_MODERN, SMALL_MODERN, _PAPER),
    targets=(271828, 314159),
    conditions={"e5m2": {"grid": "e5m2"}},
    arms={"rne": {"policy": "rne"}, "sr": {"policy": "sr"}},
    scopes=SCOPES,
    rehearse=("rne", "sr"),
    unit="seed-{seed}",
)

ESTIMANDS = (
    RUNS.estimand("progress", "fall of the reference's held-out loss, nats", measures.progress),
    RUNS.estimand("moved-by-sr", "never moved under rne less never moved under sr", measures.moved_by,
        arm="sr", scopes=["core", "all-2d"]),
)  # fmt: skip

STUDY = declared(
    __name__, RUNS, own=ESTIMANDS, **standard(RUNS, warmup=False, moved=SCOPES, target=RECOVERED),
    question="Do the policy effect and the forecast transfer to an RMSNorm/RoPE/SwiGLU decoder?",
    units="one training seed; scopes of a run are not replicates",
    not_claimed=(
        "an effect of one component: the architecture changes as a bundle",
        "that recovery is a causal share: the anchor starts from raw weights, the arms from codes",
        "that a small error on a nearly constant trajectory is transfer of the diagnostic",
        "fp8 arithmetic: compute, gradients and moments are float32",
    ),
    gates=(
        gate("learning", "progress >= 1", f"the reference learns; {OURS}"),
        gate("material", "gap-rne >= 0.1",
            f"the gap that appendix E asks for; {OURS} here"),
        gate("endpoint", "endpoint == 0", "clean visibility: clamping would freeze, too"),
        gate("matched", "matched == 1"),
        gate("recovered", "recovery-sr >= 0.9",
            f"the rule of the matched runs; {OURS} here"),
        gate("never-moved", "moved-by-sr >= 0.25", f"a contrast that matters; {OURS}"),
        gate("accurate", "rmse <= 0.05", "appendix C"),
        gate("range", "range >= 0.1", "appendix C: there is something to forecast"),
        gate("informative", "of-constant <= 0.8", "appendix C: better than the best constant"),
        gate("added-value", "added-value <= 0.9", "appendix C: better than the simpler events"),
    ),
    rules=(
        *invalid("inconclusive_invalid_training",
            **dict.fromkeys(("learning", "material", "endpoint", "matched"), "The training is not valid.")),
        rule("policy_and_diagnostic_transfer", "recovered", "never-moved", "accurate", "range", "informative",
            "added-value", says="The policy effect and the forecast transfer."),
        rule("policy_only_transfer", "recovered", "never-moved",
            says="The policy effect transfers; the forecast does not pass all of its gates."),
        rule("no_policy_transfer", says="The policy effect does not transfer."),
    ),
)  # fmt: skip

_NOTE = "162 million weights, 3000 updates; smaller scales have another model, text and horizon"
row = Beside(STUDY, "tab:modern-forecast", _NOTE, units=("seed-271828", "seed-314159"))
_FORECAST = {
    "never moved, nearest": "never-moved-rne", "never moved, stochastic": "never-moved-sr",
    "measured range": "range", "RMSE, directional": "rmse", "RMSE, best constant": "rmse-constant",
    "RMSE, symmetric": "rmse-symmetric", "RMSE, scalar rho": "rmse-rho",
}  # fmt: skip
_PRINTED = {
    "core": ((0.6587, 0.6583), (1.18e-08, 0.0), (0.05212, 0.0529), (0.00877, 0.008851),
             (0.018607, 0.018604), (0.008806, 0.008887), (0.028405, 0.028383)),
    "all-2d": ((0.7117, 0.7115), (0.00181, 0.0018), (0.03179, 0.03232), (0.009346, 0.009382),
               (0.011387, 0.011393), (0.009374, 0.009409), (0.017242, 0.017234)),
}  # fmt: skip
"""By scope, in the order of these: both seeds."""
CLAIMS = (
    row("registered label", "policy_only_transfer", row.label, source="appendix C", note=""),
    *row.each("held-out loss, fp32, {}", (4.707, 4.729), "loss-fp32", source="tab:modern-transfer"),
    *row.each("held-out loss, nearest, {}", (6.261, 6.263), "loss-rne", source="tab:modern-transfer"),
    *row.each("held-out loss, stochastic, {}", (4.817, 4.827), "loss-sr", source="tab:modern-transfer"),
    *row.each("nearest loss gap, nats, {}", (1.554, 1.534), "gap-rne", source="tab:modern-transfer"),
    *row.each("recovery, {}", (0.9294, 0.9361), "recovery-sr", source="tab:modern-transfer"),
    *(
        claim
        for scope, printed in _PRINTED.items()
        for (what, estimand), each in zip(_FORECAST.items(), printed, strict=True)
        for claim in row.each(f"{what}, {{}} {scope}", each, estimand, f"{{}} {scope}",
            source="tab:modern-transfer" if "moved" in estimand else "")
    ),
)  # fmt: skip
