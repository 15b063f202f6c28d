"""What policies won back in the committed studies, and what that says of a mask.

``recoveries.tsv`` beside this module has a row a study and policy: the share of the nearest run's loss gap
that it won back, over targets, and the share of all fp32 masters that it keeps for it. `halfulp paper` makes
it from the records in ``results/studies`` (:func:`table`) and a test holds the two together; `halfulp
allocate` prints what is near its own choice, and what needs no master at all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from halfulp.errors import UsageError
from halfulp.masks import Mask
from halfulp.study.protocol import Json
from halfulp.trace import Trace

FILE = Path(__file__).with_suffix(".tsv")
_POLICIES: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "policy-3k": {"recovery-sr": ("sr", 0.0)},
    "modern-transfer": {"recovery-sr": ("sr", 0.0)},
    "neox-transfer": {"recovery-sr": ("sr", 0.0), "recovery-eco": ("eco", 0.0)},
    "prospective-modern": {
        "recovery-source": ("P", 0.1), "recovery-freeze": ("F", 0.1), "recovery-eco": ("eco", 0.0),
        "recovery-all": ("master", 1.0),
    },
    "depth-17": {"recovery-source-P": ("P", 0.1), "recovery-control-1": ("shuffled P", 0.1)},
    "mask-reuse": {
        "recovery-source-P": ("P", 0.1), "recovery-source-F": ("F", 0.1), "recovery-source-R": ("R", 0.1),
        "recovery-control-1": ("shuffled P", 0.1), "recovery-master": ("master", 1.0),
    },
    "leverage-primary": {
        "recovery-L-10": ("L", 0.1), "recovery-L-20": ("L", 0.2), "recovery-random-1-10": ("random", 0.1),
        "recovery-random-1-20": ("random", 0.2),
    },
    "saliency-challenge": {f"recovery-{score}-10": (score, 0.1) for score in "FGUWTPR"},
    "tile-screen": {f"recovery-{s}-{p}": (s, p / 100) for p in (10, 20) for s in "CLFR"},
    "gpt2-pareto": {
        **{f"recovery-source-P-{p}": ("P", p / 100) for p in (5, 10, 20)}, "recovery-eco": ("eco", 0.0),
        "recovery-master": ("master", 1.0),
    },
}  # fmt: skip
"""By study: which of its estimands is the recovery of which policy or score, with which share of masters."""
GRID = "e5m2"


@dataclass(frozen=True)
class Recovery:
    """What a policy won back in a study: mean, least and most over its targets."""

    study: str
    scale: str
    policy: str
    share: float
    targets: int
    mean: float
    least: float
    most: float

    @property
    def told(self) -> str:
        """A range, or the one number."""
        least, most = f"{self.least:.2f}", f"{self.most:.2f}"
        return least if least == most else f"{least} to {most}"


def gathered(results: Mapping[str, Mapping[str, Json]]) -> Iterator[Recovery]:
    """From the results of closed studies, by name; e5m2 where a study has several grids."""
    for study, result in results.items():
        for estimand, (policy, share) in _POLICIES.get(study, {}).items():
            found = result["estimands"].get(estimand, {})
            several = any(unit.startswith("e4m3") for unit in found)
            values = [v for u, v in found.items() if v is not None and (not several or u.startswith(GRID))]
            if values:
                yield Recovery(study, result["scale"], policy, share, len(values), statistics.fmean(values),
                               min(values), max(values))  # fmt: skip


def table(results: Mapping[str, Mapping[str, Json]]) -> str:
    """The content of the table."""
    lines = ["\t".join(f.name for f in fields(Recovery))]
    for row in gathered(results):
        lines.append("\t".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in astuple(row)))
    return "\n".join(lines) + "\n"


def known() -> list[Recovery]:
    """The rows of the table."""
    _, *lines = FILE.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines)
    return [
        Recovery(study, scale, policy, float(share), int(n), float(mean), float(least), float(most))
        for study, scale, policy, share, n, mean, least, most in rows
    ]


def of_mask(mask: Mask, trace: Path) -> Iterator[str]:
    """What to tell somebody who has just chosen a mask: its forecast, its evidence, and the alternatives."""
    yield from _forecast(mask, Trace.open(trace))
    rows = known()
    spent = mask.payload_bytes / mask.blanket_bytes
    score = mask.score.partition(":")[0]
    near = [r for r in rows if r.policy == score]
    if near:
        yield f"won back by such masks in our own studies, as a share of what nearest rounding lost ({GRID}):"
        yield from _lines(sorted(near, key=lambda r: abs(r.share - spent))[:4])
    else:
        yield f"evidence: none of our studies has masks by {mask.score}."
    free = [r for r in rows if r.policy in ("sr", "eco")]
    yield "won back without any master, in the same kind of runs:"
    yield from _lines(free)
    ours = max((r.mean for r in near if r.share <= max(spent, 0.1) + 1e-9), default=None)
    if ours is not None and free and max(r.mean for r in free) > ours:
        best = max(free, key=lambda r: r.mean)
        yield (
            f"so consider policy={best.policy!r} first: it won back more ({best.mean:.2f} against {ours:.2f} "
            "in the mean) and keeps no master. A mask is for runs that must round to the nearest."
        )
    yield "These are small decoders and short runs: evidence, not a promise for yours."


def _lines(rows: Iterable[Recovery]) -> Iterator[str]:
    for r in rows:
        at = f" at {r.share:.0%}" if 0 < r.share < 1 else ""
        yield f"  {r.policy}{at}: {r.told} ({r.study}, {r.targets} target{'s' if r.targets > 1 else ''})"


def _forecast(mask: Mask, trace: Trace) -> Iterator[str]:
    """What an attributed rehearsal says of the chosen tiles."""
    if not trace.rehearsals:
        yield "forecast: none, because the trace has no rehearsal (halfulp audit --rehearse)."
        return
    for spec in trace.rehearsals:
        try:
            costs = trace.attribution(spec)
        except UsageError:
            continue
        named = {n: tiles for n, tiles in mask.tiles.items() if n in costs}
        inside = sum(float(costs[n][tiles.numpy()].sum()) for n, tiles in named.items())
        whole = sum(float(c.sum()) for c in costs.values())
        share = f"{inside / whole:.0%} of" if whole > 0 else "beside"
        yield (
            f"forecast: these tiles carry {share} what the rehearsal of {spec} costs ({inside:.3g} of "
            f"{whole:.3g}, summed over the moments that were attributed); tiles depend on each other, so "
            "rehearse the mask to be surer."
        )
        return
    yield "forecast: none, because no rehearsal was attributed to tiles (audit.attribute)."
