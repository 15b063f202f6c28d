"""Put into words which dtypes the optimizers of a run held, as the audit recorded them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from halfulp.text import shown
from halfulp.trace import Recorded

MOST = 6
"""Kinds of states that are named."""


def coded_words(trace: Recorded) -> str | None:
    """Name states in 8 bits or less, whose values cannot be followed; None if states were not tracked."""
    if not part(trace.manifest["options"], "roles").get("states"):
        return None
    coded: dict[str, list[str]] = {}
    for optimizer in trace.manifest.get("optimizers", ()):
        for kind, sizes in part(part(optimizer, "holds"), "states").items():
            for name in sizes if isinstance(sizes, Mapping) else ():
                dtype = getattr(torch, str(name), None)
                kinds = coded.setdefault(str(name), [])
                if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and kind not in kinds:
                    kinds.append(shown(str(kind), 40))
    parts = [f"{', '.join(kinds[:MOST])} in {name}" for name, kinds in coded.items() if kinds]
    return f"Not followed: {'; '.join(parts)}. They are codes with scales, and no values." if parts else None


def keepers(trace: Recorded) -> list[str] | None:
    """Name the states that keep what 16-bit weights do not hold; None if such weights have none.

    Weights that a write-back stores are not among them: its policy decides.
    """
    named: dict[str, None] = {}
    for optimizer in trace.manifest.get("optimizers", ()):
        holds = part(optimizer, "holds")
        if not {"bfloat16", "float16"}.intersection(part(holds, "parameters")):
            continue  # it steps no such weight
        states = holds.get("keeps")
        if not isinstance(states, list) or not states:
            return None
        whose = shown(str(optimizer.get("class")), 30)
        named.update(dict.fromkeys(f"{whose}'s {shown(str(kind), 40)}" for kind in states))
    return list(named)


def written(trace: Recorded) -> set[str]:
    """Return the names of the grids on which write-backs store weights."""
    holds = [part(part(o, "holds"), "parameters") for o in trace.manifest.get("optimizers", ())]
    return {str(name).split(" written by ")[0] for h in holds for name in h if " written by " in str(name)}


def stored_words(trace: Recorded, names: Sequence[str]) -> str:
    """Say what weights are stored in, by ``names``, and the optimizer's states where they are followed."""
    weights = " and ".join(names)
    entries = trace.manifest.get("optimizers", ())
    sizes = [s for o in entries for s in part(part(o, "holds"), "states").values() if isinstance(s, Mapping)]
    states = {shown(str(dtype), 40) for each in sizes for dtype in each}
    if not states:
        return f"weights are {weights}"
    whose = f"{shown(str(entries[0].get('class')), 30)}'s state"
    if states == set(names):
        return f"weights and {whose} are {weights}"
    return f"weights are {weights} ({whose} {' and '.join(sorted(states))})"


def words(trace: Recorded) -> str | None:
    """Say in a line what the optimizers held; None where it was not recorded."""
    return words_of([o.get("holds") for o in trace.manifest.get("optimizers", ())])


def words_of(holds: Iterable[Any]) -> str | None:
    """Return the same from what was found of each optimizer."""
    entries = [h for h in holds if isinstance(h, Mapping)]
    if not entries:
        return None
    parts = [_words(name, [part(t, name) for t in entries]) for name in ("parameters", "gradients")]
    states: dict[str, list[Mapping[str, Any]]] = {}
    for t in entries:
        for kind, sizes in part(t, "states").items():
            if isinstance(sizes, Mapping):
                states.setdefault(str(kind), []).append(sizes)
    alike: dict[str, list[str]] = {}
    for kind, sizes in states.items():
        alike.setdefault(_words("", sizes).strip(), []).append(shown(kind, 40))
    for dtypes, kinds in alike.items():
        more = f" and {len(kinds) - MOST} more" if len(kinds) > MOST else ""
        parts.append(f"{', '.join(kinds[:MOST])}{more} {dtypes}")
    if not states:
        parts.append("no states")
    return f"The optimizer holds: {'; '.join(parts)}."


def part(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object within an object of a manifest; an empty one if there is none."""
    value = entry.get(name)
    return value if isinstance(value, Mapping) else {}


def _words(name: str, sizes: Iterable[Mapping[str, Any]]) -> str:
    total: Counter[str] = Counter()
    for each in sizes:
        total.update({shown(str(k), 80): int(v) for k, v in each.items() if isinstance(v, int)})
    everything = sum(total.values())
    if not everything:
        return f"{name} none"
    if len(total) == 1:
        return f"{name} {next(iter(total))}"
    return f"{name} " + ", ".join(f"{k} ({n / everything:.0%})" for k, n in total.most_common())
