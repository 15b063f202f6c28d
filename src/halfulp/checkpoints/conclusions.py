"""Draw conclusions from a :class:`~halfulp.checkpoints.Diff`, each in one sentence and with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from halfulp.checkpoints.comparing import Difference
from halfulp.text import count, shown

if TYPE_CHECKING:
    from halfulp.checkpoints.differences import Diff

NARROW = ("bfloat16", "float16")


def conclusions(found: Diff) -> Iterator[str]:
    """Yield what the numbers mean, the most serious first; nothing if there is nothing to say."""
    tensors = found.tensors
    for said in (_norms(tensors), _lost(found), _still(tensors), _rounded(tensors), _export(tensors)):
        if said is not None:
            yield said
    yield from _masters(found)
    old, new = found.states
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


def _lost(found: Diff) -> str | None:
    """Rows of an embedding that no batch used did not move either, so embeddings are left out."""
    trained = [t for t in found.tensors if t.kind in NARROW and 0 < t.same < t.weights]
    trained = [t for t in trained if t.group != "embedding"]
    moved, same = sum(t.moved for t in trained), sum(t.same for t in trained)
    if not trained or same < moved:
        return None
    how = ", and most that did moved by one step" if sum(t.one_step for t in trained) >= moved / 2 else ""
    share = f"{same / (same + moved):.0%} of the weights of tensors that were trained did not move{how}"
    kept = found.states[1]
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
    held = [t for t in wide if t.on_bfloat16 == t.weights]
    if not held or sum(t.weights for t in held) < sum(t.weights for t in wide) / 2:
        return None
    return (
        f"Rounded: {len(held)} of {len(wide)} tensors of the second file are float32 but hold bfloat16 "
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


def _masters(found: Diff) -> Iterator[str]:
    off = [t for t in found.masters if t.moved]
    if off:
        far = max(off, key=lambda t: t.moved)
        yield (
            f"Masters: {len(off)} of {len(found.masters)} are not the weights when rounded ("
            f"{far.moved / far.weights:.0%} of {shown(far.name)}, up to {count(far.largest, 'step')}): "
            "weights and masters are of different steps, or one of them was not loaded or saved."
        )
    if found.orphans:
        yield (
            f"Masters: {len(found.orphans)} agree with no weight of their shape, such as that of shape "
            f"{found.orphans[0]}: they are not masters of these weights."
        )
