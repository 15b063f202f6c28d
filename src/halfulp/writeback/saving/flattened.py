"""Take up a flattened optimizer state, which torch makes with ``flatten_optimizer_state_dict=True``.

Such a state is one dictionary from ``state.<parameter>.<name>`` and ``param_groups.<parameter>.<option>`` to
values, by the model's names; torchtitan saves it, with the parameters of all model parts together. Torch
loads it by the names that the state of the *new* optimizer has. A write-back has others in its state than it
shows (the wrapped optimizer holds float32 stand-ins), so torch would find none, and drop the moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from halfulp.errors import CorruptionError, UsageError
from halfulp.text import unwrapped_name

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack


def unflattened(state: Mapping[str, Any], optimizer: WriteBack, model: torch.nn.Module) -> dict[str, Any]:
    """Return a flattened state in the form that ``optimizer.load_state_dict`` takes.

    Args:
        state: A flattened state, of a write-back or of the plain optimizer. Other models' parameters may be
            in it.
        optimizer: The optimizer that will take it up.
        model: The model, or the part of it, whose parameters the optimizer has.

    Returns:
        An ordinary state dictionary.

    Raises:
        UsageError: If a parameter of the optimizer is not in the model, or not in the state.
        CorruptionError: If it is not a flattened state.

    >>> import halfulp as hu
    >>> from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    >>> model = torch.nn.Linear(4, 4).bfloat16()
    >>> opt = hu.AdamW(model.parameters())
    >>> flat = get_optimizer_state_dict(
    ...     model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True)
    ... )
    >>> opt.load_state_dict(unflattened(flat, opt, model))
    """
    parts = _by_name(state, _names(state))
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    given = {id(p): unwrapped_name(name) for name, p in inner.named_parameters(remove_duplicate=False)}
    entries: dict[int, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        first = len(entries)
        for p in group["params"]:
            name = given.get(id(p))
            if name is None or name not in parts["param_groups"]:
                raise UsageError(
                    f"parameter {len(entries)} of the optimizer "
                    + ("is not in the model" if name is None else f"({name!r}) is not in the flattened state")
                    + ": give the model whose parameters the optimizer has, and the state of that model."
                )
            entries[len(entries)] = parts["state"].get(name, {})
        numbers = range(first, len(entries))
        options = parts["param_groups"][given[id(group["params"][0])]] if group["params"] else {}
        groups.append({**options, "params": list(numbers)})
    return {"state": {n: entry for n, entry in entries.items() if entry}, "param_groups": groups}


def _names(state: Mapping[str, Any]) -> set[str]:
    """Return the names of parameters: an option's name has no dot, so the last one ends a parameter's."""
    keys = (str(key) for key in state)
    return {key.partition(".")[2].rpartition(".")[0] for key in keys if key.startswith("param_groups.")}


def _by_name(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Sort values by part and parameter; of names that begin alike, the longest counts."""
    known = set(names)
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in state.items():
        part, _, rest = str(key).partition(".")
        cuts = [i for i, letter in enumerate(rest) if letter == "."]
        at = next((i for i in reversed(cuts) if rest[:i] in known), None)
        if part not in parts or at is None:
            raise CorruptionError(
                f"not a flattened optimizer state: it has {key!r}, expected state.PARAMETER.NAME and "
                "param_groups.PARAMETER.OPTION."
            )
        parts[part].setdefault(rest[:at], {})[rest[at + 1 :]] = value
    return parts
