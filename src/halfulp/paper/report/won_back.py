"""Make the table of what policies won back (``recoveries.tsv``) from the results of closed studies."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields

from halfulp.report.recoveries import GRID, Recovery
from halfulp.study.protocol import Json

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


def gathered(results: Mapping[str, Mapping[str, Json]]) -> Iterator[Recovery]:
    """From the results of closed studies, by name; e5m2 where a study has several grids."""
    for study, result in results.items():
        for estimand, (policy, share) in _POLICIES.get(study, {}).items():
            units = result["estimands"].get(estimand, {})
            several = any(unit.startswith("e4m3") for unit in units)
            values = [v for u, v in units.items() if v is not None and (not several or u.startswith(GRID))]
            if values:
                yield Recovery(study, result["scale"], policy, share, len(values), statistics.fmean(values),
                               min(values), max(values))  # fmt: skip


def table(results: Mapping[str, Mapping[str, Json]]) -> str:
    """Return the content of the table."""
    lines = ["\t".join(f.name for f in fields(Recovery))]
    for row in gathered(results):
        lines.append("\t".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in astuple(row)))
    return "\n".join(lines) + "\n"
