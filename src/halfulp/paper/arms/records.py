"""Read the record of an arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.measures.groups import CORE

Record = Mapping[str, Any]
Array = npt.NDArray[np.float64]

DENSE = "dense"
"""The historical scope: the equal mean of the shares of attention and mlp, not weighted by coordinates."""


def groups_of(record: Record, scope: str) -> list[str]:
    """Return the groups that a scope is the union of: core, all-2d, or a group."""
    known = sorted(record["coordinates"])
    return known if scope == "all-2d" else [g for g in known if g in (CORE if scope == "core" else (scope,))]


def share(record: Record, counts: Mapping[str, Any], scope: str) -> Any:
    """Counts by group, of one moment or of many, as a share of a scope's coordinates."""
    if scope == DENSE:
        return np.mean([share(record, counts, group) for group in CORE], axis=0)
    groups = groups_of(record, scope)
    total = sum(record["coordinates"][g] for g in groups)
    return np.sum([counts[g] for g in groups], axis=0) / total


def frozen(record: Record, name: str, scope: str, of: str = "frozen") -> Array:
    """Return the share of a scope's coordinates that every update leaves unchanged, weighted by coordinates.

    On a grid, by its name; ``of="rehearsed"``: in a run that was rehearsed, by what it was declared as.
    """
    return np.asarray(share(record, record[of][name], scope), dtype=np.float64)


def rehearsed_losses(record: Record, spec: str) -> dict[str, dict[str, float | None]]:
    """Return the held-out loss of a rehearsal by update and bound; JSON has no numbers for names."""
    return {str(e["update"]): e["rehearsed"][spec]["loss"] for e in record["evaluations"]}


def never_moved(record: Record, scope: str) -> float:
    """Return the share of a scope's coordinates that no update has moved, at the last evaluation."""
    return float(share(record, record["evaluations"][-1]["never_moved"], scope))


def losses(record: Record) -> dict[int, float | None]:
    """Return the held-out loss, which others call validation loss, by update."""
    return {e["update"]: e["loss"] for e in record["evaluations"]}


def loss(record: Record, update: int | None = None) -> float | None:
    """Return the held-out loss after an update; the last by default."""
    return losses(record).get(record["updates"] if update is None else update)
