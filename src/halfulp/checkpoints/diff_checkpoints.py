"""Implement ``halfulp diff``: what training changed between two checkpoints, by their stored values alone.

A weight that is stored on a coarse grid moves by whole steps of it, or not at all. So two checkpoints show a
lot without a run: the tensors that did not change, the norm gains that are still exactly one, whether weights
moved by a single step (a sign that most updates were rounded away), whether a float32 file holds only
bfloat16 values, the types of the optimizer's state, and whether masters match the weights.

Tensors are compared one after the other (:mod:`~halfulp.checkpoints.diff_tensors`), each piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp.checkpoints.diff_page import page
from halfulp.checkpoints.diff_states import NARROW, Kept, compare_masters, global_step, kept_states
from halfulp.checkpoints.diff_tensors import CLASSES, Array, Difference, compared, together, unfit
from halfulp.checkpoints.stored_tensors import located, opened
from halfulp.errors import UsageError
from halfulp.measures.groups import GROUPS
from halfulp.text import count, shown

NOTHING = (
    "Nothing stands out of what is checked: norms at 1.0, half of the weights or more unchanged, a rounded "
    "export, masters and states that are missing."
)


@dataclass(frozen=True)
class Diff:
    """The changes between two checkpoints; returned by :func:`diff`."""

    before: str
    after: str
    tensors: list[Difference]
    groups: list[Difference]
    """The tensors by kind of layer; biases and norm gains are separate from matrices."""
    total: Difference
    """All tensors together."""
    skipped: dict[str, str]
    """Tensors that were not compared, and why."""
    states: tuple[Kept | None, Kept | None] = (None, None)
    """The optimizer states in the files beside the weights."""
    steps: tuple[int | None, int | None] = (None, None)
    """The training steps of the two checkpoints, where they record them."""
    masters: list[Difference] = field(default_factory=list)
    """The second checkpoint's weights compared with its rounded masters."""
    orphans: list[str] = field(default_factory=list)
    """The shapes of masters that belong to no weight."""

    def says(self) -> list[str]:
        """Return what the numbers mean, the most serious first; empty if there is nothing to say."""
        return list(_conclusions(self))

    def lines(self, most: int | None = 12) -> list[str]:
        """Describe the result in words: the total, groups, the tensors that moved least, and conclusions.

        Args:
            most: The number of tensors to list; None for all.
        """
        all_ = self.total
        when = "" if None in self.steps else f" between steps {self.steps[0]:,} and {self.steps[1]:,}"
        out = [f"{count(len(self.tensors), 'tensor')}, {all_.weights:,} weights{when}: {_words(all_)}."]
        out += [f"  {g.name:<10} {_words(g)}" for g in self.groups if len(self.groups) > 1]
        listed = self._least_moved()
        out += [f"    {t.share:7.2%} unchanged of {shown(t.name)}: {_rest(t)}" for t in listed[:most]]
        if most is not None and len(listed) > most:
            out.append(f"    and {len(listed) - most} more tensors (--all)")
        if all_.nonfinite:
            out.append(f"  NOT FINITE: {all_.nonfinite:,} weights, in none of these shares")
        whys: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            whys.setdefault(why, []).append(name)
        for why, names in whys.items():
            out.append(f"  not compared: {count(len(names), 'tensor')}, such as {shown(names[0])}: {why}")
        for place, kept in zip((self.before, self.after), self.states, strict=True):
            out += [f"  optimizer of {shown(place)}: {line}" for line in (kept.lines() if kept else [])]
        return [*out, *self._said()]

    def _said(self) -> list[str]:
        return self.says() or [NOTHING]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per tensor, for a file or a data frame."""
        return [_row(t) for t in self.tensors]

    def to_json(self) -> dict[str, Any]:
        """Return every number of the report in a form that ``json.dumps`` accepts."""
        return {
            "before": self.before, "after": self.after, "steps": list(self.steps), "says": self.says(),
            "total": _row(self.total), "groups": [_row(g) for g in self.groups], "tensors": self.table(),
            "skipped": self.skipped, "states": [kept and kept.to_json() for kept in self.states],
            "masters": [_row(t) for t in self.masters], "orphans": self.orphans,
        }  # fmt: skip

    def _least_moved(self) -> list[Difference]:
        return sorted(self.tensors, key=lambda t: (-t.share, -t.weights, t.name))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def page(self) -> str:
        """Return a self-contained HTML page."""
        by = "Share of the weights that are what they were, by"
        rows = {f"{by} kind of layer": self.groups, f"{by} tensor": self._least_moved()}
        tables = {heading: [(t.name, t.share, _rest(t)) for t in those] for heading, those in rows.items()}
        return page(f"{self.before} and {self.after}", [self.lines(0)[0], *self._said()], tables)


def diff(
    before: str | Path | torch.nn.Module | Mapping[str, torch.Tensor],
    after: str | Path | torch.nn.Module | Mapping[str, torch.Tensor],
) -> Diff:
    """Compare two checkpoints, and measure changes in steps of the stored format.

    Args:
        before: A ``.safetensors`` file, an index of shards, a folder, a file of ``torch.save``, a GGUF file,
            a model or its tensors.
        after: The later checkpoint, in any of the same forms.

    Returns:
        The counts per tensor, per group and in total, and what they mean.

    Raises:
        UsageError: If there is no checkpoint, or the two have no tensor in common.
        CorruptionError: If a file is damaged.

    >>> one = {"norm.weight": torch.ones(8, dtype=torch.bfloat16)}
    >>> moved = diff(one, {"norm.weight": torch.tensor([1.0] * 7 + [1.0078125], dtype=torch.bfloat16)})
    >>> moved.total.same, moved.total.one_step, moved.total.at_one
    (7, 1, 7)
    """
    places = [_place(x) for x in (before, after)]
    labels = [
        str(p) if isinstance(p, Path) else name for p, name in zip(places, ("before", "after"), strict=True)
    ]
    rows: list[Difference] = []
    moves: dict[str, Array] = {}
    with opened(places[0]) as old, opened(places[1]) as new, ThreadPoolExecutor(2) as pool:
        kept = [kept_states(p) if isinstance(p, Path) else None for p in places]
        skipped = {name: f"only in {labels[0]}" for name in old if name not in new}
        for name, b in new.items():
            a = old.get(name)
            why = f"only in {labels[1]}" if a is None else unfit(a, b)
            if why is not None:
                skipped[name] = why
            elif a is not None:
                row, classes = compared(a, b, pool)
                rows.append(row)
                moves[row.group] = moves.get(row.group, np.zeros(CLASSES, dtype=np.int64)) + classes
        masters, orphans = ([], []) if kept[1] is None else compare_masters(kept[1], new, pool)
    if not rows:
        first = next(iter(skipped), None)
        raise UsageError(
            f"{labels[0]} and {labels[1]} have no weights in common that could be compared: "
            + ("both are empty." if first is None else f"of {shown(first)}, {skipped[first]}.")
        )
    order = sorted(moves, key=lambda g: (GROUPS.index(g) if g in GROUPS else len(GROUPS), g))
    groups = [together(g, [t for t in rows if t.group == g], moves[g]) for g in order]
    total = together("all", rows, np.sum(list(moves.values()), axis=0))
    steps = [global_step(p) if isinstance(p, Path) else None for p in places]
    return Diff(
        labels[0], labels[1], rows, groups, total, skipped, (kept[0], kept[1]), (steps[0], steps[1]), masters,
        orphans,
    )  # fmt: skip


def _place(what: Any) -> Path | Mapping[str, torch.Tensor]:
    if isinstance(what, torch.nn.Module):
        return {name: x for name, x in what.state_dict().items() if isinstance(x, torch.Tensor)}
    return located(what)


def _row(t: Difference) -> dict[str, Any]:
    return {**asdict(t), "share": t.share}


def _words(t: Difference) -> str:
    """Describe the counts in words."""
    rest = _rest(t)
    return f"{t.share:.2%} unchanged{' ' if rest.startswith('[') else '; '}{rest}"


def _rest(t: Difference) -> str:
    """Describe the counts without the share that did not change."""
    special = [f"{n:,} still exactly {v}" for n, v in ((t.at_one, 1), (t.at_zero, 0)) if n > t.weights / 100]
    out = [" and ".join(special)] if special else []
    if t.moved:
        one = t.one_step / t.moved
        out.append(f"{one:.0%} of the rest moved by one step, {1 - one:.0%} further")
        out.append(f"typically {t.typical:,} step{'' if t.typical == 1 else 's'}, at most {t.largest:,}")
    return f"{'; '.join(out)}{' ' if out else ''}[{t.kind}]"


# ---- conclusions ----------------------------------------------------------------------------------


def _conclusions(result: Diff) -> Iterator[str]:
    """Yield what the numbers mean, each in a sentence with its remedy, the most serious first."""
    tensors = result.tensors
    for said in (_norms(tensors), _lost(result), _still(tensors), _rounded(tensors), _export(tensors)):
        if said is not None:
            yield said
    yield from _masters(result)
    old, new = result.states
    if new is not None:
        yield from new.says()
        yield from new.changed(old) if old is not None else ()


def _norms(tensors: Sequence[Difference]) -> str | None:
    gains = [t for t in tensors if t.group == "norm" and t.name.endswith(("weight", "gain", "scale"))]
    weights, still = sum(t.weights for t in gains), sum(t.at_one for t in gains)
    whole = [t for t in gains if t.at_one == t.weights]
    if not gains or (not whole and still < weights / 2):
        return None
    kind = max(gains, key=lambda t: t.at_one).kind
    if whole:
        which = f"{len(whole)} of {len(gains)} gains still hold exactly 1.0 everywhere"
        which += f" (such as {shown(whole[0].name)})"
    else:
        which = f"{still / weights:.0%} of the entries of {count(len(gains), 'gain')} are still exactly 1.0"
    return (
        f"Norms: {which}. In {kind} a small step cannot leave 1.0: they were not trained, or every update "
        "was rounded away."
    )


def _lost(result: Diff) -> str | None:
    """Rows of an embedding that no batch used did not move either, so embeddings are left out."""
    trained = [t for t in result.tensors if t.kind in NARROW and t.same and t.moved]
    trained = [t for t in trained if t.group != "embedding"]
    moved, same = sum(t.moved for t in trained), sum(t.same for t in trained)
    if not trained or same < moved:
        return None
    how = ", and most that did moved by one step" if sum(t.one_step for t in trained) >= moved / 2 else ""
    share = f"{same / (same + moved):.0%} of the weights of tensors that were trained did not move{how}"
    kept = result.states[1]
    if kept is not None and kept.masters:
        return (
            f"Small changes: in {trained[0].kind}, {share}. The optimizer keeps masters, which hold what is "
            "still below half a gap."
        )
    return (
        f"Lost updates: in {trained[0].kind}, {share}. Unless the optimizer has float32 masters, updates "
        "below half a gap are rounded away, every time: optimizer = hu.AdamW(model.named_parameters(), "
        "lr=...)."
    )


def _still(tensors: Sequence[Difference]) -> str | None:
    still = [t for t in tensors if t.same == t.weights and t.at_one + t.at_zero < t.weights]
    if not still:
        return None
    which = (
        "no tensor changed" if len(still) == len(tensors) else f"{count(len(still), 'tensor')} did not change"
    )
    return (
        f"Unchanged: {which} at all ({sum(t.weights for t in still):,} weights, such as "
        f"{shown(still[0].name)}): frozen on purpose, without a gradient, or every update was rounded away."
    )


def _rounded(tensors: Sequence[Difference]) -> str | None:
    wide = [t for t in tensors if t.kind.endswith("float32") and t.weights > t.at_one + t.at_zero]
    rounded = [t for t in wide if t.on_bfloat16 == t.weights]
    if not rounded or sum(t.weights for t in rounded) < sum(t.weights for t in wide) / 2:
        return None
    return (
        f"Rounded: {len(rounded)} of {len(wide)} tensors of the second file are float32 but hold bfloat16 "
        "values only: they were trained in bfloat16, or rounded when they were exported."
    )


def _export(tensors: Sequence[Difference]) -> str | None:
    narrowed = [t for t in tensors if t.kind.endswith(tuple(f"float32 -> {kind}" for kind in NARROW))]
    if not narrowed:
        return None
    kinds = narrowed[0].kind.replace("->", "to")
    rest = "both were rounded before they were compared"
    if not any(t.moved for t in narrowed):
        rest = "the second file is the first, rounded"
    return f"Export: {count(len(narrowed), 'tensor')} went from {kinds}; {rest}."


def _masters(result: Diff) -> Iterator[str]:
    off = [t for t in result.masters if t.moved]
    if off:
        far = max(off, key=lambda t: t.moved)
        yield (
            f"Masters: {len(off)} of {len(result.masters)} are not the weights when rounded ("
            f"{far.moved / far.weights:.0%} of {shown(far.name)}, up to {count(far.largest, 'step')}): "
            "weights and masters are of different steps, or one of them was not loaded or saved."
        )
    if result.orphans:
        yield (
            f"Masters: {len(result.orphans)} agree with no weight of their shape, such as that of shape "
            f"{result.orphans[0]}: they are not masters of these weights."
        )
