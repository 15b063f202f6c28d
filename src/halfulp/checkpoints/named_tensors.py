"""Collect the tensors of a model or a mapping by name: whole ones, and local shards of distributed ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halfulp import tensors
from halfulp.checkpoints import boxes
from halfulp.checkpoints.boxes import Box
from halfulp.errors import UsageError
from halfulp.text import shown

Held = torch.nn.Module | Mapping[str, torch.Tensor]


def named(held: Held) -> dict[str, torch.Tensor]:
    """Return the tensors that have values, by name; tied tensors under their first name."""
    found = _all(held)
    for name, x in found.items():
        _check(name, x)
    return found


def pieces(held: Held) -> tuple[dict[str, torch.Tensor], dict[str, Box]]:
    """Return the tensors that this rank owns, by name, and the boxes of those that are shards.

    If none is distributed, these are all tensors.
    """
    everything = _all(held)
    sharded = {name: x for name, x in everything.items() if boxes.is_sharded(x)}
    speaks = all(boxes.speaks(x) for x in sharded.values())
    found, places = {}, {}
    for name, x in everything.items():
        if name not in sharded:
            _check(name, x)
            if speaks:
                found[name] = x
        elif (box := boxes.box_of(name, x)) is not None:
            found[name] = x.to_local()  # type: ignore[attr-defined]  # a DTensor
            _check(name, found[name])
            places[name] = box
    return found, places


def tied_names(held: Held) -> dict[str, list[str]]:
    """Return the further names of tied tensors, by their first name."""
    if not isinstance(held, torch.nn.Module):
        return {}
    names: dict[torch.Tensor, list[str]] = {}
    for pairs in (held.named_parameters(remove_duplicate=False), held.named_buffers(remove_duplicate=False)):
        for name, x in pairs:
            names.setdefault(x, []).append(_plain(name))
    return {first: others for first, *others in names.values() if others}


def _all(held: Held) -> dict[str, torch.Tensor]:
    if isinstance(held, torch.nn.Module):
        pairs = [(_plain(n), x) for n, x in (*held.named_parameters(), *held.named_buffers())]
    else:
        pairs = list(held.items())
    return {name: x.detach() for name, x in pairs if x.numel()}


def _plain(name: str) -> str:
    """Return a name without the part that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def _check(name: str, x: torch.Tensor) -> None:
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        raise UsageError(
            f"{shown(name)!r} is a {type(x).__name__}: give plain tensors. (Sync follows the shards of a "
            "distributed model; a copy to which changes are applied is whole.)"
        )
    if x.dtype not in tensors.NAMES:
        raise UsageError(f"{shown(name)!r} is {x.dtype}, which safetensors cannot hold.")
