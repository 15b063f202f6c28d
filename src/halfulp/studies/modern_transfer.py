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

from halfulp.arms import Bundle, standard
from halfulp.arms.family import PAPER_MODERN, SMALL_MODERN, SMOKE_MODERN, three_thousand
from halfulp.measures.forecasts import (
    RECOVERED,
)
from halfulp.studies.declared import declared

SCOPES = ("core", "all-2d")

RUNS = Bundle(
    scales=three_thousand(SMOKE_MODERN, SMALL_MODERN, PAPER_MODERN),
    targets=(271828, 314159),
    conditions={"e5m2": {"grid": "e5m2"}},
    arms={"rne": {"policy": "rne"}, "sr": {"policy": "sr"}},
    scopes=SCOPES,
    rehearse=("rne", "sr"),
    unit="seed-{seed}",
)

STUDY = declared(__name__, RUNS, **standard(RUNS, warmup=False, moved=SCOPES, target=RECOVERED))
