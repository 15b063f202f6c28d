"""The summary of a step as named numbers for a dashboard, and what dashboards share."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from halfulp.text import shown, tell

LONGEST = 120


class Scalars:
    """Turns what a listener is called with into tags and values.

    ``halfulp/frozen/GRID`` (the share of updates lost), ``halfulp/never_moved/GRID``, ``halfulp/gain/GRID``
    (how much of the update arrives), ``halfulp/update_ratio``, and ``halfulp/tensor/NAME/GRID`` for up to
    ``worst`` tensors a grid: those that lose the majority of their updates, the worst first. A tensor that is
    shown once is shown from then on. Of moments and copies that are followed,
    ``halfulp/roles/ROLE/frozen/GRID`` and ``never_moved``, under the names that they have in the trace. What
    is not known at a step is left out.
    """

    def __init__(self, worst: int = 8) -> None:
        self.worst = worst
        self._shown: dict[str, list[str]] = {}
        self._roles: dict[str, int] = {}
        """The newest reported step of every tracked state."""

    def of(self, summary: dict[str, Any]) -> dict[str, float]:
        """Return the tags and values of one step."""
        out = {
            f"halfulp/{what}/{tag(g)}": share
            for what in ("frozen", "never_moved", "gain")
            for g, share in summary.get(what, {}).items()
        }
        for role, beside in summary.get("roles", {}).items():
            if self._roles.get(role) != beside["step"]:
                self._roles[role] = beside["step"]
                for what in ("frozen", "never_moved"):
                    places = {
                        f"halfulp/roles/{tag(role)}/{what}/{tag(g)}": x for g, x in beside[what].items()
                    }
                    out |= places
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
        return {name: value for name, value in out.items() if value == value}


class Dashboard:
    """A listener that sends every audited step to an external dashboard.

    The first failure (a full disk, an unreachable server) is reported once and disables the dashboard;
    training and audit continue.
    """

    def __init__(self, worst: int) -> None:
        self.scalars = Scalars(worst)
        self.trouble: str | None = None
        """Why the dashboard was disabled, if it was."""

    def __call__(self, summary: dict[str, Any]) -> None:
        """Log one summary; after a failure say so once and log no more."""
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
        """Send the tags and values of a step to the dashboard."""
        raise NotImplementedError


def tag(name: str) -> str:
    r"""Return a name as part of a tag: letters, digits and ``_ . @ # -``, with limited length.

    A changed name gets a mark, so that different names stay different.

    >>> tag("transformer.h.0.attn.weight"), tag("int8/row")
    ('transformer.h.0.attn.weight', 'int8-row')
    >>> tag("a\nb")
    'a_b-7e18f737'
    """
    plain = name.replace("/", "-") if re.fullmatch(r"[a-z0-9_@]+(/[a-z0-9]+)*", name) else name
    safe = re.sub(r"[^A-Za-z0-9_.@#-]", "_", plain)
    if safe == plain and 0 < len(safe) <= LONGEST:
        return safe
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe[:LONGEST]}-{mark}"
