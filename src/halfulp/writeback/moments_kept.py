"""Say how an optimizer in one pass keeps its moments: in float32, bfloat16, or codes of eight bits.

A moment in codes is two entries of the optimizer's state instead of one: ``exp_avg_codes``, shaped like the
parameter, and ``exp_avg_scales``, one for every 64 values (:mod:`halfulp.kernels.coded_moments`). They have
names of their own so that no other optimizer takes codes for moments. Tensors of one dimension (norm gains,
biases) keep float32 moments: they are few, and their shards begin anywhere.

A shard has the codes of the whole tensor if its rows are whole blocks, and is refused otherwise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from halfulp.kernels import coded_moments
from halfulp.kernels.coded_moments import BLOCK, Coded
from halfulp.numbers.streams import keys_of, name_bytes
from halfulp.writeback.rules import rule_of
from halfulp.writeback.sharding import is_sharded, local, shard_offset, wrap_like, wrap_rows

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
CODES, SCALES = "_codes", "_scales"


def dtype_of(wb: WriteBack, slot: Slot) -> torch.dtype:
    """Return the type in which the moments of a tensor are kept; int8 means codes."""
    return torch.float32 if wb.moments == torch.int8 and len(slot.shape) < 2 else wb.moments


def names(wb: WriteBack) -> list[str]:
    """Return the names of everything that the optimizer's states may keep of moments."""
    rule = rule_of(wb.optimizer)
    ends = ("", CODES, SCALES) if wb.moments == torch.int8 else ("",)
    return [] if rule is None else [key + end for key in rule.moments for end in ends]


def tensors(
    wb: WriteBack, slot: Slot, state: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's moments, or their codes and the scales of these."""
    rule = rule_of(wb.optimizer)
    assert rule is not None
    keys = rule.kept(wb.param_groups[slot.place[0]])
    if dtype_of(wb, slot) != torch.int8:
        return [local(state[key]) for key in keys], []
    codes, scales = ([local(state[key + end]) for key in keys] for end in (CODES, SCALES))
    return codes, scales


def begin(wb: WriteBack, slot: Slot, state: dict[str, Any], key: str) -> bool:
    """Put a moment of zeros into a state that has none; return True if it had none."""
    if state.get(key) is not None or state.get(key + CODES) is not None:
        return False
    p, dtype = local(slot.p), dtype_of(wb, slot)
    shape = slot.codes.shape if slot.codes is not None else p.shape
    if dtype != torch.int8:
        state[key] = wrap_like(torch.zeros(shape, dtype=dtype, device=p.device), slot.p)
        return True
    codes = torch.zeros(shape, dtype=_type_of_codes(wb, key), device=p.device)
    _put(slot, state, key, codes, torch.zeros(_shape_of_scales(shape), dtype=torch.float32, device=p.device))
    return True


def coded(state: dict[str, Any], key: str) -> Coded:
    """Return a moment in codes."""
    return Coded(local(state[key + CODES]), local(state[key + SCALES]))


def why_not(wb: WriteBack, slot: Slot) -> str | None:
    """Return why a tensor's moments cannot be kept as asked."""
    if dtype_of(wb, slot) != torch.int8:
        return None
    if not local(slot.p).is_cpu:
        return f"{slot.name!r} is on a GPU, where moments are float32 or bfloat16"
    if is_sharded(slot.p) and math.prod(slot.shape[1:]) % BLOCK:
        return (
            f"{slot.name!r} is a shard whose rows of {math.prod(slot.shape[1:])} values are not whole blocks "
            f"of {BLOCK}, which share a scale: its moments can be fp32 or bf16"
        )
    return None


def why_not_now(wb: WriteBack, slot: Slot, state: dict[str, Any]) -> str | None:
    """Return why the moments that a state has are not as this optimizer keeps them."""
    p, dtype = local(slot.p), dtype_of(wb, slot)
    for name in names(wb):
        if (x := state.get(name)) is None or name.endswith(SCALES):
            continue
        here = local(x)
        kind = _type_of_codes(wb, name.removesuffix(CODES)) if name.endswith(CODES) else dtype
        alike = (here.dtype, here.device, here.numel()) == (kind, p.device, p.numel())
        if not (alike and here.is_contiguous()):
            return f"{name} of {slot.name!r} is not contiguous {kind} of its size"
    return None


@torch.no_grad()
def restore(wb: WriteBack, slot: Slot, state: dict[str, Any]) -> None:
    """Bring loaded moments into this optimizer's form: torch has cast them to the type of the parameter."""
    rule = rule_of(wb.optimizer)
    assert rule is not None
    dtype = dtype_of(wb, slot)
    for key in rule.moments:
        if state.get(key + CODES) is not None:
            state[key + CODES] = state[key + CODES].to(_type_of_codes(wb, key))
            state[key + SCALES] = state[key + SCALES].float()
        elif state.get(key) is not None and dtype == torch.int8:
            _encode(wb, slot, state, key)
        elif state.get(key) is not None:
            state[key] = state[key].to(dtype)


def _encode(wb: WriteBack, slot: Slot, state: dict[str, Any], key: str) -> None:
    whole = local(state.pop(key)).float().contiguous()
    codes = torch.zeros(whole.shape, dtype=_type_of_codes(wb, key), device="cpu")
    scales = torch.zeros(_shape_of_scales(whole.shape), dtype=torch.float32, device="cpu")
    stream = keys_of(wb.seed, [name_bytes(slot.name) + b"\0moments"], wb.steps, 16)[0].tolist()
    coded_moments.encode(whole, Coded(codes, scales), (stream[0], stream[1]), shard_offset(slot.p))
    _put(slot, state, key, codes, scales)


@torch.no_grad()
def widened(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state with float32 moments where it has codes, for an optimizer that does not keep codes."""
    wide = dict(state)  # entries that are of no parameter stay
    for k, entry in state.items():
        if not isinstance(entry, dict):
            continue
        wide[k] = {name: x for name, x in entry.items() if not str(name).endswith((CODES, SCALES))}
        for key in [name.removesuffix(CODES) for name in entry if str(name).endswith(CODES)]:
            here = coded(entry, key)
            values = torch.empty(here.codes.shape, dtype=torch.float32, device="cpu")
            coded_moments.decode(Coded(here.codes.contiguous(), here.scales.contiguous()), values)
            wide[k][key] = wrap_like(values, entry[key + CODES])
    return wide


def _type_of_codes(wb: WriteBack, key: str) -> torch.dtype:
    rule = rule_of(wb.optimizer)
    return torch.uint8 if rule is not None and key in rule.moments[1:] else torch.int8


def _shape_of_scales(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Return rows by blocks where rows are whole blocks, so that scales are sharded like the rows."""
    row, size = math.prod(shape[1:]), math.prod(shape)
    return (-(-size // BLOCK),) if row % BLOCK else (shape[0], row // BLOCK)


def _put(slot: Slot, state: dict[str, Any], key: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    state[key + CODES] = wrap_like(codes, slot.p)
    state[key + SCALES] = wrap_rows(scales, slot.p) if is_sharded(slot.p) else scales
