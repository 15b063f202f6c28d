"""Calibration: how far a rehearsal was off in an earlier pair of runs, for the next one.

A pair is a reference with a rehearsal and a real run on that grid and policy, both evaluated at the same
steps. What a calibration keeps of it is the gap to the reference that was measured beside the gaps that were
forecast. The next time, the forecast gap is multiplied by

    ratio = measured gap / gap of the upper bound

because the open loop has no pull in it and its excess hardly depended on the model where rate and horizon
were the same. So it is taken for the same rehearsal only, and another rate or horizon is said, with the
difference. Where the upper bound was not kept, the ratio is that of the point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfulp import documents, files
from halfulp.documents import Fields, check_digest, check_keys, parsed
from halfulp.errors import CorruptionError, UsageError, VersionError
from halfulp.text import shown
from halfulp.trace import Columns, Recorded
from halfulp.trace.schema import BOUNDS
from halfulp.trace.stored_on import is_of, policies
from halfulp.version import __version__

KIND, FORMAT = "halfulp.calibration", 1
SMALLEST_GAP = 0.01
"""Below this many nats a gap says nothing about a ratio."""
ALIKE = 1.25
"""Rates and steps within this factor are taken as the same."""
MOST_PAIRS = 10_000


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One rehearsal beside one real run, at one step."""

    spec: str
    step: int
    rate: float
    """The largest rate of the reference up to there."""
    weights: int
    real: float
    measured: float
    forecast: Mapping[str, float]
    """The loss by bound."""
    source: str
    """Description of the runs that it comes from."""

    def gap(self, bound: str) -> float:
        """Return a bound of the forecast minus the real loss."""
        return self.forecast[bound] - self.real

    @property
    def usable(self) -> list[str]:
        """The bounds whose gap a ratio can be taken of, the best first."""
        return [b for b in ("upper", "point") if b in self.forecast and self.gap(b) >= SMALLEST_GAP]

    def ratio(self, bound: str) -> float:
        """Return the factor that a forecast gap is to be multiplied by."""
        return (self.measured - self.real) / self.gap(bound)


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A forecast that an earlier pair corrected."""

    loss: float
    ratio: float
    bound: str
    pair: Pair
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """Pairs of earlier runs; ``str()`` describes them."""

    pairs: tuple[Pair, ...]

    @classmethod
    def from_runs(
        cls, reference: Recorded, measured: Recorded | float, spec: str | None = None, step: int | None = None
    ) -> Calibration:
        """Create a calibration from a reference with a rehearsal and the outcome on that grid.

        Args:
            reference: A trace with an evaluated rehearsal.
            measured: The run on the rehearsed grid, or its loss.
            spec: The rehearsal; optional if it can be inferred.
            step: The step of ``measured`` if it is a loss.

        Raises:
            UsageError: If the rehearsal was not evaluated, or does not fit the outcome.
        """
        chosen = _chosen(reference, measured, spec)
        losses = reference.forecast(chosen).compared()
        if not len(losses):
            raise UsageError(
                f"{reference.where} rehearsed {chosen} but evaluated nothing: there is no forecast of a loss "
                "to calibrate. Record it with audit.evaluate(...), or halfulp audit --evaluate."
            )
        outcome = _outcome(reference, measured, losses, step)
        made, small = [], []
        for at, loss in outcome.items():
            rows = losses.take(losses["step"] == at)
            forecast: dict[str, float] = dict(rows.select("bound", "loss").rows())
            real = float(rows["real"][0])
            finite = all(math.isfinite(x) for x in (real, loss, *forecast.values()))
            bound = "upper" if "upper" in forecast else "point"
            if not finite or bound not in forecast or forecast[bound] - real < SMALLEST_GAP:
                small.append(at)
                continue
            made.append(
                Pair(
                    spec=chosen, step=at, rate=_peak_rate(reference, at), weights=reference.numel("all"),
                    real=real, measured=loss, forecast=forecast, source=_source(reference, measured),
                )
            )  # fmt: skip
        if not made:
            raise UsageError(
                f"{chosen}: at none of the {len(small)} common evaluations is the forecast gap finite and at "
                f"least {SMALLEST_GAP:g} nats, so there is no ratio to take. Compare the losses themselves."
            )
        return cls(tuple(made))

    def __add__(self, other: Calibration) -> Calibration:
        return Calibration(self.pairs + other.pairs)

    # ---- the file ----

    def save(self, path: str | Path) -> None:
        """Write a JSON document with its digest, atomically."""
        pairs = [
            {
                "rehearsal": p.spec, "step": p.step, "rate": p.rate, "weights": p.weights, "real": p.real,
                "measured": p.measured, "forecast": dict(p.forecast), "source": p.source,
            }
            for p in self.pairs
        ]  # fmt: skip
        told = {"kind": KIND, "format": FORMAT, "halfulp": __version__, "pairs": pairs}
        files.put(Path(path), documents.sealed(told))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what :meth:`save` wrote; anything else is refused."""
        where = Path(path)
        content = files.read(where, documents.MOST_BYTES, follow=True)
        found = parsed(content, where, "a calibration of halfulp's")
        check_keys(content, where)
        fields = Fields(found, str(where))
        fields.take("kind", repr(KIND), lambda v: v == KIND)
        if found.get("format") != FORMAT:
            raise VersionError(
                f"{where} is a calibration of format {found.get('format')!r}; this halfulp reads {FORMAT}."
            )
        check_digest(found, where)
        pairs = tuple(_read(f) for f in fields.each("pairs", MOST_PAIRS))
        if not pairs:
            raise CorruptionError(f"{where} holds no pair.")
        return cls(pairs)

    # ---- its use ----

    def of(
        self, trace: Recorded, spec: str, step: int, real: float, forecast: Mapping[str, float | None]
    ) -> Calibrated | None:
        """Return a forecast corrected by the pair of the same rehearsal that is nearest in rate and step."""
        peak = _peak_rate(trace, step)
        fitting = [p for p in self.pairs if p.spec == spec]
        if not fitting:
            return None
        pair = min(fitting, key=lambda p: (_apart(p.rate, peak) + _apart(p.step, step), p.step))
        bound = next((b for b in pair.usable if forecast.get(b) is not None), None)
        if bound is None:
            return None
        warnings = []
        for what, there, here in (("rate", pair.rate, peak), ("step", pair.step, step)):
            if _apart(there, here) > math.log(ALIKE):
                warnings.append(
                    f"{spec}: calibrated by a pair with another {what}, {there:g} there and {here:g} here "
                    f"({_times(there, here)}); the excess of the open loop grows with both, so take it as a "
                    "hint."
                )
        ratio, there_gap = pair.ratio(bound), float(forecast[bound] or 0.0) - real
        return Calibrated(
            loss=real + ratio * there_gap, ratio=ratio, bound=bound, pair=pair, warnings=tuple(warnings)
        )

    def told(self, specs: Sequence[str]) -> list[str]:
        """Say what was calibrated, from what, and what was not."""
        known = {p.spec: p for p in self.pairs}
        out = []
        for spec in (s for s in specs if s in known):
            pair, bound = known[spec], _bound(known[spec])
            out.append(
                f"{spec} is calibrated by {shown(pair.source, 200)}, where the measured gap was "
                f"{pair.ratio(bound):.2f} of that of the {bound} bound (step {pair.step})."
            )
        rest = [spec for spec in specs if spec not in known]
        if rest:
            both = " Do not compare them with those that are." if out else ""
            out.append(f"Not calibrated, for want of a pair: {', '.join(rest)}.{both}")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """Pair by pair, in words."""
        out = []
        for p in self.pairs:
            each = ", ".join(f"{b} {p.forecast[b]:.4f} ({_share(p, b)})" for b in BOUNDS if b in p.forecast)
            out.append(
                f"{p.spec}, step {p.step}, rate {p.rate:g}: reference {p.real:.4f}, measured "
                f"{p.measured:.4f} ({p.measured - p.real:+.4f}); forecast {each}"
            )
        return out


def _share(pair: Pair, bound: str) -> str:
    """Return the share of the measured gap that a bound forecast."""
    gap = pair.measured - pair.real
    return (
        f"{pair.gap(bound) / gap:.2f} of the gap" if abs(gap) >= SMALLEST_GAP else f"{pair.gap(bound):+.4f}"
    )


def _bound(pair: Pair) -> str:
    return "upper" if "upper" in pair.forecast else "point"


def _apart(a: float, b: float) -> float:
    return abs(math.log(a / b)) if a > 0 and b > 0 else math.inf


def _times(there: float, here: float) -> str:
    return f"{max(there, here) / min(there, here):.2g} times" if min(there, here) > 0 else "of another kind"


def _chosen(reference: Recorded, measured: Recorded | float, spec: str | None) -> str:
    """Return the rehearsal that a measured run is the outcome of."""
    if not reference.rehearsals:
        raise UsageError(f"{reference.where} rehearsed nothing: record it with rehearse= or --rehearse.")
    if spec is not None:
        reference.forecast(spec)
        return spec
    if isinstance(measured, Recorded):
        fitting = [s for s in reference.rehearsals if is_of(s, measured)]
        if len(fitting) == 1:
            return fitting[0]
        listed = ", ".join(reference.rehearsals)
        raise UsageError(
            f"{measured.where} is not a run of exactly one of the rehearsals of {reference.where} ({listed})"
            f": it {_stored(measured)}. Name the one that it is to be taken for, --rehearsal SPEC."
        )
    if len(reference.rehearsals) == 1:
        return reference.rehearsals[0]
    raise UsageError(
        f"{reference.where} rehearsed {', '.join(reference.rehearsals)}: say which one, --rehearsal SPEC."
    )


def _stored(measured: Recorded) -> str:
    grids = sorted({shown(str(t["stored"]), 30) for t in measured.tensors})
    how = ", ".join(policies(measured)) or "the optimizer's own casts"
    return f"stores weights in {', '.join(grids)} by {how}"


def _outcome(
    reference: Recorded, measured: Recorded | float, losses: Columns, step: int | None
) -> dict[int, float]:
    """Return the measured loss by step, where the reference was evaluated, too."""
    steps = sorted(set(losses["step"].tolist()))
    if step is not None and step not in steps:
        raise UsageError(f"{reference.where} was not evaluated at step {step}, but at {_few(steps)}.")
    if not isinstance(measured, Recorded):
        return {steps[-1] if step is None else step: float(measured)}
    own = measured.real_losses()
    common = [s for s in steps if s in own and (step is None or s == step)]
    if not own:
        raise UsageError(
            f"{measured.where} holds no evaluation: record one with audit.evaluate(...) or halfulp audit "
            "--evaluate, or give its loss as a number in its place."
        )
    if not common:
        raise UsageError(
            f"no evaluation is common: {reference.where} has steps {_few(steps)}, {measured.where} has "
            f"{_few(sorted(own))}."
        )
    if reference.numel("all") != measured.numel("all"):
        raise UsageError(
            f"{reference.where} has {reference.numel('all'):,} weights and {measured.where} "
            f"{measured.numel('all'):,}: they are not of the same model."
        )
    return {s: own[s] for s in common}


def _peak_rate(trace: Recorded, step: int) -> float:
    """Return the largest learning rate up to a step; 0 if none is known."""
    rows = trace.scan("tensors", "step", "lr")
    return float(np.fmax.reduce(rows["lr"][rows["step"] <= step], initial=0.0))


def _few(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{steps[0]}, {steps[1]}, ... {steps[-1]}"


def _source(reference: Recorded, measured: Recorded | float) -> str:
    there = measured.where if isinstance(measured, Recorded) else "a loss that was given"
    return f"{reference.where} and {there}"


def _read(found: Fields) -> Pair:
    def finite(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    def number(fields: Fields, key: str) -> float:
        return float(fields.take(key, "a finite number", finite))

    bounds = found.within("forecast")
    if not {"upper", "point"} & set(bounds.values) or not set(bounds.values) <= set(BOUNDS):
        raise CorruptionError(
            f"{bounds.where} is of {shown(str(sorted(bounds.values)))}, expected some of "
            f"{', '.join(BOUNDS)}, upper or point among them. Make it again (halfulp calibrate)."
        )
    made = Pair(
        spec=found.text("rehearsal", 1000),
        step=found.whole("step", 1),
        rate=float(found.take("rate", "a finite number, not negative", lambda v: finite(v) and v >= 0)),
        weights=found.whole("weights", 1),
        real=number(found, "real"),
        measured=number(found, "measured"),
        forecast={bound: number(bounds, bound) for bound in bounds.values},
        source=found.text("source", 10_000),
    )
    if made.gap(_bound(made)) < SMALLEST_GAP:
        raise CorruptionError(
            f"{found.where}: the forecast gap is below {SMALLEST_GAP:g}: not a calibration."
        )
    return made
