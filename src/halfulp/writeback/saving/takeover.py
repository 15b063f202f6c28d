"""Continue from the state of an optimizer that had no write-back.

If you find lost updates in the middle of a run, your checkpoint is one of plain ``torch.optim.AdamW``. Its
moments are loaded in the type in which this optimizer keeps them, and so are the settings of its groups, as
torch does. The state of a policy starts from the current weights of the model, as when the write-back was
made: they are projected, a master is their copy, a carry is zero, the step is 0. (If no weights were set
since it was made, that state has already started from them and is kept.)

Torch itself checks only the number of parameters. For an optimizer whose state is known, the state must be of
its kind and match the parameters' shapes and shards.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from halfulp.errors import CorruptionError, UsageError
from halfulp.writeback.rules import rule_of
from halfulp.writeback.sharding import is_sharded, local

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.policies import State
    from halfulp.writeback.slot import Slot

HOW = ("fused", "foreach", "capturable", "differentiable")
"""Settings of a group that say how torch computes a step, not which: those of this optimizer stay."""
Start = tuple["Slot", torch.Tensor | None, "State"]
"""A parameter, its stored values where they change, and what its policy keeps."""


def fitted(
    wb: WriteBack, groups: Sequence[dict[str, Any]], by_number: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups of a plain state in the form that this optimizer takes.

    Raises:
        UsageError: If the state is of other groups, parameters or another optimizer.
    """
    sizes, mine = ([len(g["params"]) for g in both] for both in (groups, wb.param_groups))
    if sizes != mine:
        raise UsageError(
            f"this optimizer state has groups of {_counted(sizes)} parameters, this optimizer of "
            f"{_counted(mine)}. Make the optimizer with the groups that the run had (Trainer has two, with "
            "and without weight decay)."
        )
    _check_names(wb, groups)
    places = [(g, p) for g, own in zip(groups, wb.param_groups, strict=True) for p in own["params"]]
    names = wb._chooser.names(wb.param_groups)
    for n, (group, p) in enumerate(places):
        _check_entry(wb, names[p], p, by_number.get(n, {}), group)
    return [_with_own_options(g, own) for g, own in zip(groups, wb.param_groups, strict=True)]


def _counted(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes))


def _with_own_options(group: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a saved group with this optimizer's way to compute, and its names, which streams go by."""
    kept = (*HOW, "param_names")
    return {k: v for k, v in group.items() if k not in kept} | {k: own[k] for k in kept if k in own}


def _check_names(wb: WriteBack, groups: Sequence[dict[str, Any]]) -> None:
    for group, own in zip(groups, wb.param_groups, strict=True):
        pairs = zip(group.get("param_names") or (), own.get("param_names") or (), strict=False)
        for theirs, mine in ((a, b) for a, b in pairs if a != b):
            raise UsageError(
                f"this optimizer state has parameter {theirs!r} where this optimizer has {mine!r}: it is of "
                "another model, or of another order. Make the optimizer with the parameters as they were."
            )


def _check_entry(
    wb: WriteBack, name: str, p: torch.Tensor, entry: dict[str, Any], group: dict[str, Any]
) -> None:
    """Refuse a parameter's state that is not of this kind of optimizer; an unknown one takes any."""
    rule = rule_of(wb.optimizer)
    if rule is None or not entry:
        return
    expected = {
        *rule.moments,
        *(["step"] if rule.counts else []),
        *(["max_exp_avg_sq"] if group.get("amsgrad") else []),
    }
    if set(entry) != expected:
        raise UsageError(
            f"this optimizer state is neither of a write-back nor of {type(wb.optimizer).__name__}: of "
            f"parameter {name!r} it has {', '.join(sorted(map(str, entry)))}, expected "
            f"{', '.join(sorted(expected))}. Load a state of the same optimizer, or start without one."
        )
    for key, value in ((k, v) for k, v in entry.items() if k != "step" and v is not None):
        if not isinstance(value, torch.Tensor) or value.shape != p.shape:
            saved = tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise UsageError(
                f"this optimizer state has {key} of parameter {name!r} as {saved}, expected "
                f"{tuple(p.shape)}: it is of another model, or of another order of its parameters."
            )
        if is_sharded(value) != is_sharded(p) or local(value).shape != local(p).shape:
            raise UsageError(
                f"this optimizer state has {key} of parameter {name!r} {_where(value)}, but the parameter is "
                f"{_where(p)}. Use set_optimizer_state_dict of torch.distributed.checkpoint.state_dict: "
                "it shards a state like the model."
            )


def _where(x: torch.Tensor) -> str:
    return f"in shards ({tuple(local(x).shape)} on this rank)" if is_sharded(x) else "whole"


@torch.no_grad()
def starts(wb: WriteBack) -> list[Start]:
    """Compute the starting values of every managed parameter without changing any.

    Codes are on their grid already.
    """
    all_starts: list[Start] = []
    for slot in wb.slots:
        if slot.resting:
            raise UsageError(
                "the model holds the weights for evaluation: call train() on the optimizer before "
                "load_state_dict()."
            )
        raw = slot.values()
        q = raw if slot.codes is not None else wb._projected(slot, raw)[0]
        stays = torch.equal(q, raw)
        state = slot.state if stays and _belongs(slot, q) else slot.policy.start(raw, q, slot.name)
        all_starts.append((slot, None if stays else q, state))
    return all_starts


def _belongs(slot: Slot, q: torch.Tensor) -> bool:
    """Return True if what a policy keeps is of these weights: a raw master knows more than they do."""
    try:
        slot.check_state(slot.state, q)
    except CorruptionError:
        return False
    return bool(slot.state) and not slot.edited()


@torch.no_grad()
def begin(wb: WriteBack, all_starts: Sequence[Start]) -> None:
    """Apply the starting values of :func:`starts`, and log it."""
    for slot, q, state in all_starts:
        if q is not None:
            slot.store(q)
        slot.state, slot.noted = state, None
        if slot.moved is not None:
            slot.moved.zero_()
        slot.note_written()
    wb.steps = 0
    grids = ", ".join(sorted({f"{slot.policy.name} on {slot.grid.name}" for slot, *_ in all_starts}))
    logging.getLogger("halfulp").warning(
        "halfulp: this optimizer state was saved without a write-back. Its moments are taken over; %s (%s "
        "tensors) begins from the weights that the model has now.",
        grids, len(all_starts),
    )  # fmt: skip
