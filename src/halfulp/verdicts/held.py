"""Read the dtypes that the optimizers of a run held, as the audit recorded them, and put them into words.

Others may have written the manifest: what is not a count of values by dtype is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfulp.text import shown
from halfulp.trace import Recorded

MOST = 6
"""Kinds of states that are named."""
Sizes = dict[str, int]
"""Values by dtype."""


@dataclass(frozen=True)
class Holdings:
    """The dtypes that one optimizer held."""

    kind: str
    """Its class."""
    parameters: Sizes
    gradients: Sizes
    states: dict[str, Sizes]
    keeps: tuple[str, ...]
    """States that keep what its 16-bit weights do not hold."""

    @classmethod
    def of(cls, holds: Mapping[str, Any], kind: object = None) -> Holdings:
        """Read what a manifest says of an optimizer."""
        states, keeps = holds.get("states"), holds.get("keeps")
        known = states.items() if isinstance(states, Mapping) else ()
        return cls(
            kind=shown(str(kind), 30),
            parameters=_sizes(holds.get("parameters")),
            gradients=_sizes(holds.get("gradients")),
            states={str(name): _sizes(sizes) for name, sizes in known if isinstance(sizes, Mapping)},
            keeps=tuple(map(str, keeps)) if isinstance(keeps, list) else (),
        )


def holdings(trace: Recorded) -> list[Holdings]:
    """Return what each optimizer of a run held, as far as that was recorded."""
    entries = [o for o in trace.manifest.get("optimizers", ()) if isinstance(o, Mapping)]
    return [Holdings.of(o["holds"], o.get("class")) for o in entries if isinstance(o.get("holds"), Mapping)]


def coded_words(trace: Recorded) -> str | None:
    """Name states in 8 bits or less, whose values cannot be followed; None if there are none."""
    roles = trace.manifest["options"].get("roles")
    if not isinstance(roles, Mapping) or not roles.get("states"):
        return None
    coded: dict[str, dict[str, None]] = {}
    for kind, dtype in ((k, d) for h in holdings(trace) for k, sizes in h.states.items() for d in sizes):
        known = getattr(torch, dtype, None)
        if isinstance(known, torch.dtype) and known.itemsize == 1:
            coded.setdefault(dtype, {})[shown(kind, 40)] = None
    parts = [f"{', '.join(list(kinds)[:MOST])} in {dtype}" for dtype, kinds in coded.items()]
    return f"Not followed: {'; '.join(parts)}. They are codes with scales, and no values." if parts else None


def keepers(trace: Recorded) -> str | None:
    """Name the states that keep what 16-bit weights do not hold; None unless all such weights have one."""
    names: dict[str, None] = {}
    for h in holdings(trace):
        if {"bfloat16", "float16"}.intersection(h.parameters):
            if not h.keeps:
                return None
            names.update(dict.fromkeys(f"{h.kind}'s {shown(state, 40)}" for state in h.keeps))
    return " and ".join(names) or None


def stored_words(trace: Recorded, names: Sequence[str]) -> str:
    """Say what weights are stored in, by ``names``, and the optimizer's states where they are followed."""
    weights, known = " and ".join(names), holdings(trace)
    states = {shown(dtype, 40) for h in known for sizes in h.states.values() for dtype in sizes}
    if not states:
        return f"weights are {weights}"
    whose = f"{known[0].kind}'s state"
    if states == set(names):
        return f"weights and {whose} are {weights}"
    return f"weights are {weights} ({whose} {' and '.join(sorted(states))})"


def words(trace: Recorded) -> str | None:
    """Say in a line what the optimizers held; None where it was not recorded."""
    return _words(holdings(trace))


def words_of(holds: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the same from what was found of each optimizer."""
    return _words([Holdings.of(h) for h in holds])


def _words(known: Sequence[Holdings]) -> str | None:
    if not known:
        return None
    parts = [
        f"parameters {_shares(h.parameters for h in known)}",
        f"gradients {_shares(h.gradients for h in known)}",
    ]
    kinds = dict.fromkeys(kind for h in known for kind in h.states)
    alike: dict[str, list[str]] = {}
    for kind in kinds:
        alike.setdefault(_shares(h.states.get(kind, {}) for h in known), []).append(shown(kind, 40))
    for dtypes, names in alike.items():
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        parts.append(f"{', '.join(names[:MOST])}{more} {dtypes}")
    return f"The optimizer holds: {'; '.join(parts if kinds else [*parts, 'no states'])}."


def _sizes(sizes: object) -> Sizes:
    pairs = sizes.items() if isinstance(sizes, Mapping) else ()
    return {str(dtype): n for dtype, n in pairs if isinstance(n, int)}


def _shares(several: Iterable[Sizes]) -> str:
    """Name the dtypes of some values, the most frequent first, with their shares if there are several."""
    total: Counter[str] = Counter()
    for sizes in several:
        total.update({shown(dtype, 80): n for dtype, n in sizes.items()})
    everything = sum(total.values())
    if not everything:
        return "none"
    if len(total) == 1:
        return next(iter(total))
    return ", ".join(f"{dtype} ({n / everything:.0%})" for dtype, n in total.most_common())
