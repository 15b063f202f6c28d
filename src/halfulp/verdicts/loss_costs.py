"""The cost of a format, in loss: the forecasts of a trace with rehearsals, in words and numbers.

A rehearsal that was evaluated says what the loss would have been: a point, and around it the projection
(everything that is lost is compensated at once) and the open loop (nothing is). They come from one run. That
the loss of a real run on the format lies between them was observed, not proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfulp.numbers.grids import grid as named
from halfulp.text import shown
from halfulp.trace import Recorded
from halfulp.verdicts.intervals import COVERAGE, of_point
from halfulp.writeback.policies import POLICIES

FLOAT32 = 4.0
WHAT = "a forecast from this one run, with bounds as observed, not proved"
PILOT = "A pilot narrows intervals for a little extra compute: halfulp pilot."
DEFAULT_PULL = "root_of_peak"
"""The pull of rehearsals, as a trace names it, whose errors the shipped intervals are of."""
MISSING = (
    "no loss is forecast: nothing was evaluated while the run was audited. Name the script's own evaluation, "
    "halfulp audit --evaluate FUNCTION; or, in Python, call audit.evaluate(lambda: evaluate(model)); or "
    "evaluate the weights that were written (as_if/*.safetensors), point and upper"
)

REHEARSED = (
    "the losses above are those of weights that were moved by this run's own updates, not of a run that "
    "really went on from them."
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One rehearsal at its last evaluation."""

    spec: str
    step: int
    real: float
    """The reference's own loss."""
    lower: float | None
    point: float | None
    upper: float | None
    calibrated_pull: bool = False
    """True if the point was pulled by the default rule, whose errors are known."""

    @property
    def loss(self) -> float:
        """The forecast: the point if there is one, otherwise an available bound."""
        return next(x for x in (self.point, self.upper, self.lower) if x is not None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 90% interval of the gap; None where no errors are known."""
        if not self.calibrated_pull or self.point is None:
            return None
        return of_point(self.spec, self.gap) if np.isfinite(self.gap) else None

    @property
    def gap(self) -> float:
        """The loss above the reference's."""
        return self.loss - self.real


def costs(trace: Recorded) -> list[Cost]:
    """Return the cost of each evaluated rehearsal at its last evaluation, the cheapest first."""
    forecasts = []
    for spec in trace.rehearsals:
        losses = trace.forecast(spec).compared()
        if not len(losses):
            continue
        step = int(losses["step"][-1])
        last = {b: x for s, b, x, _ in losses.rows() if s == step}
        cost = Cost(
            spec=spec,
            step=step,
            real=float(losses["real"][-1]),
            lower=last.get("lower"),
            point=last.get("point"),
            upper=last.get("upper"),
            calibrated_pull=trace.manifest["options"]["rehearse"]["pull"] == DEFAULT_PULL,
        )
        forecasts.append(cost)
    return sorted(forecasts, key=lambda c: (not np.isfinite(c.loss), c.loss if np.isfinite(c.loss) else 0.0))


def bytes_per_weight(spec: str) -> float | None:
    """Return the bytes of a weight stored packed, with what its policy keeps beside the code.

    None where they depend on more than the spec: masters in chosen tiles, a rehearsal by a name of its own.

    >>> bytes_per_weight("e4m3@128:sr"), bytes_per_weight("bf16:kahan"), bytes_per_weight("mine")
    (1.0, 6.0, None)
    """
    grid, _, how = spec.partition(":")
    name = how.partition("(")[0] or "rne"
    try:
        beside = 2.0 if "bfloat16" in how else POLICIES[name].bytes_kept
        return named(grid).bytes_per_weight + beside
    except (KeyError, ValueError):
        return None


def saved(spec: str, weights: int) -> str:
    """Say what a format saves against float32 weights.

    >>> saved("bf16", 1_000_000), saved("e4m3@128:master", 2_000)
    ('saves 2 bytes per weight (2 MB)', 'adds 1 bytes per weight (2 kB)')
    """
    each = bytes_per_weight(spec)
    if each is None:
        return "saves what its masters leave"
    whole, unit = abs(FLOAT32 - each) * weights, "bytes"
    for larger in ("kB", "MB", "GB"):
        if whole >= 1000:
            whole, unit = whole / 1000, larger
    what = "saves" if each <= FLOAT32 else "adds"
    return f"{what} {abs(FLOAT32 - each):.3g} bytes per weight ({whole:.3g} {unit})"


def nats(loss: float | None) -> str:
    """Format a loss.

    >>> nats(1.23456), nats(None), nats(float("nan"))
    ('1.235', '-', 'not finite')
    """
    if loss is None:
        return "-"
    return f"{loss:.3f}" if np.isfinite(loss) else "not finite"


def bracket(cost: Cost) -> tuple[float, float] | None:
    """Return the ends of a forecast's bracket, the lower one first; None where one is missing."""
    if cost.lower is None or cost.upper is None:
        return None
    return min(cost.lower, cost.upper), max(cost.lower, cost.upper)


def between(cost: Cost) -> str:
    """Return the bracket of a forecast, in words."""
    ends = bracket(cost)
    return "-" if ends is None else f"{nats(ends[0])} to {nats(ends[1])}"


def spread(cost: Cost) -> str:
    """Return the 90% interval of a gap, in words."""
    return "-" if cost.interval is None else f"{cost.interval[0]:+.3f} to {cost.interval[1]:+.3f}"


def lines(trace: Recorded) -> list[str]:
    """Return the costs, for a terminal; none if nothing was rehearsed."""
    if not trace.rehearsals:
        return []
    forecasts = costs(trace)
    names = ", ".join(shown(spec, 60) for spec in trace.rehearsals)
    if not forecasts:
        return ["", f"Rehearsed: {names}, but {MISSING}."]
    steps = sorted({c.step for c in forecasts})
    when = f"at step {steps[-1]}" if len(steps) == 1 else f"at the last evaluation (step {steps[-1]})"
    out = [
        "",
        f"What a format would cost, in loss, {when}, where this run has {nats(forecasts[0].real)}, with "
        f"{COVERAGE:.0%} intervals, and what it saves: {WHAT}.",
    ]
    labels, gaps = [shown(c.spec, 60) for c in forecasts], [_told(c) for c in forecasts]
    wide = max(map(len, labels)), max(map(len, gaps))
    weights = trace.numel("all-2d")
    for c, name, gap in zip(forecasts, labels, gaps, strict=True):
        out.append(
            f"  {name:{wide[0]}}  {gap:{wide[1]}}  {saved(c.spec, weights)}; loss {nats(c.loss)}, bracket "
            f"{between(c)}"
        )
    out += [f"  {line}" for line in cautions(forecasts)]
    out += [f"  {PILOT}"] if any(c.interval for c in forecasts) else []
    return out


def cautions(forecasts: Sequence[Cost]) -> list[str]:
    """Say what limits these forecasts."""
    said: list[str] = []
    if forecasts and all(x in (c.real, None) for c in forecasts for x in (c.lower, c.point, c.upper)):
        said.append(
            "Not one rehearsal changed this number. What is evaluated may be another copy of the model than "
            "the one that is trained, such as one loaded from a file; or the number is too coarse to tell."
        )
        return said
    outside = [c.spec for c in forecasts if _outside(c)]
    if outside:
        said.append(f"{', '.join(outside)}: the forecast is beyond its bracket, which is not sharper.")
    odd = [c.spec for c in forecasts if c.upper is not None and c.lower is not None and c.upper < c.lower]
    if odd:
        said.append(
            f"{', '.join(odd)}: upper and lower bound are the other way round, as where a format costs "
            "nothing that this evaluation can see."
        )
    return said


def _outside(cost: Cost) -> bool:
    """Return True if the raw forecast is outside its bounds, to the digits that are shown."""
    ends = bracket(cost)
    if cost.point is None or ends is None:
        return False
    low, point, high = (round(x, 3) for x in (ends[0], cost.point, ends[1]))
    return point < low or point > high


def _told(cost: Cost) -> str:
    """Return a gap with its interval."""
    return _signed(cost.gap) + (f" ({spread(cost)})" if cost.interval is not None else "")


def _signed(gap: float) -> str:
    return f"{gap:+.3f}" if np.isfinite(gap) else "not finite"
