"""The summary of a step as named numbers for a dashboard, and what dashboards share."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from halfulp.text import shown, tell

LONGEST = 120


class Scalars:
    """Turns what a listener is called with into tags and values.

    ``halfulp/frozen/GRID`` and ``halfulp/never_moved/GRID`` (shares of all weights), ``halfulp/gain/GRID``
    (how much of the update arrives), ``halfulp/update_ratio``, and ``halfulp/tensor/NAME/GRID`` for up to
    ``worst`` tensors a grid: those that lose the majority of their updates, the worst first. A tensor that is
    shown once is shown from then on.
    """

    def __init__(self, worst: int = 8) -> None:
        self.worst = worst
        self._shown: dict[str, list[str]] = {}

    def of(self, summary: dict[str, Any]) -> dict[str, float]:
        """Tags and values of one step."""
        out = {f"halfulp/frozen/{tag(g)}": share for g, share in summary["frozen"].items()}
        out |= {f"halfulp/never_moved/{tag(g)}": share for g, share in summary["never_moved"].items()}
        out |= {f"halfulp/gain/{tag(g)}": share for g, share in summary.get("gain", {}).items()}
        out["halfulp/update_ratio"] = summary["update_ratio"]
        tensors = summary["tensors"]
        for grid in summary["frozen"]:
            here = self._shown.setdefault(grid, [])
            lost = sorted(
                (n for n in tensors if tensors[n][grid] >= 0.5), key=lambda n: (-tensors[n][grid], n)
            )
            new = [n for n in lost if n not in here]
            here += new[: max(self.worst - len(here), 0)]
            for name in here:
                if name in tensors:
                    out[f"halfulp/tensor/{tag(name)}/{tag(grid)}"] = tensors[name][grid]
        return out


class Dashboard:
    """A listener that tells somebody else's dashboard of every audited step.

    Where that fails (a full disk, a server that is gone) it is said once, and the dashboard is told nothing
    from there on: the training goes on, and so does the audit.
    """

    def __init__(self, worst: int) -> None:
        self.scalars = Scalars(worst)
        self.trouble: str | None = None
        """Why the dashboard is no longer told, if it is not."""

    def __call__(self, summary: dict[str, Any]) -> None:
        if self.trouble is not None:
            return
        try:
            self.show(summary["step"], self.scalars.of(summary))
        except Exception as error:  # whatever a library of others may raise
            self.trouble = f"{type(error).__name__}: {error}"
            tell(
                f"halfulp: {type(self).__name__} could not be told of step {summary['step']} "
                f"({shown(self.trouble, 300)}). Training and audit go on; it is told nothing from here on."
            )

    def show(self, step: int, values: dict[str, float]) -> None:
        """Tell it tags and values of a step."""
        raise NotImplementedError


def tag(name: str) -> str:
    """A name as a part of a tag: letters, digits and ``_ . @ # -``, and not too long.

    What had to be changed gets a mark, so that different names stay different.

    >>> tag("transformer.h.0.attn.weight"), tag("int8/row")
    ('transformer.h.0.attn.weight', 'int8-row')
    >>> tag("a\\nb")
    'a_b-7e18f737'
    """
    plain = name.replace("/", "-") if re.fullmatch(r"[a-z0-9_@]+(/[a-z0-9]+)*", name) else name
    safe = re.sub(r"[^A-Za-z0-9_.@#-]", "_", plain)
    if safe == plain and 0 < len(safe) <= LONGEST:
        return safe
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe[:LONGEST]}-{mark}"
