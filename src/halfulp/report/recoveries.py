"""Recoveries: the loss that policies won back in the committed studies, and what that says of a mask.

``recoveries.tsv`` beside this module has one row per study and policy: the share of the nearest run's loss
gap that it won back, over targets, and the share of all fp32 masters that it keeps for it. It is made from
the records in ``results/studies``; `halfulp allocate` prints what is near its own choice, and what needs no
master at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halfulp.allocation.masks import Mask
from halfulp.errors import UsageError
from halfulp.trace import Trace

FILE = Path(__file__).with_suffix(".tsv")
GRID = "e5m2"
AFTERWARDS = (
    "To forecast the loss with this mask: halfulp audit --rehearse 'GRID:tiles(MASK)' --evaluate FUNCTION, "
    "with its grid and file."
)


@dataclass(frozen=True)
class Recovery:
    """The share that a policy won back in a study: mean, least and most over its targets."""

    study: str
    scale: str
    policy: str
    share: float
    targets: int
    mean: float
    least: float
    most: float

    @property
    def span(self) -> str:
        """A range, or the one number."""
        least, most = f"{self.least:.2f}", f"{self.most:.2f}"
        return least if least == most else f"{least} to {most}"


def known() -> list[Recovery]:
    """Return the rows of the table."""
    _, *lines = FILE.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines)
    return [
        Recovery(study, scale, policy, float(share), int(n), float(mean), float(least), float(most))
        for study, scale, policy, share, n, mean, least, most in rows
    ]


def of_mask(mask: Mask, trace: Path) -> Iterator[str]:
    """Yield lines on a newly chosen mask: its forecast, its evidence and the alternatives."""
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
        yield f"  {r.policy}{at}: {r.span} ({r.study}, {r.targets} target{'s' if r.targets > 1 else ''})"


def _forecast(mask: Mask, trace: Trace) -> Iterator[str]:
    """Say what an attributed rehearsal forecasts for the chosen tiles."""
    if not trace.rehearsals:
        yield f"forecast: none yet. {AFTERWARDS}"
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
    yield f"forecast: none yet. {AFTERWARDS}"
