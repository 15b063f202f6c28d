"""Shard packed weights under FSDP2: shards are codes, and FSDP2 gathers codes.

FSDP2 asks the local tensor of a sharded parameter what to gather (``fsdp_pre_all_gather``) and what to make
of it (``fsdp_post_all_gather``). A :class:`PackedShard` answers with this rank's codes and scales as bytes,
and decodes the codes of all ranks into the whole weight, which FSDP2 frees after the forward and asks for
again in the backward. So a weight has values only while its module runs, and ``bits / 8`` bytes are gathered.

Ranks have different numbers of rows, and codes of fewer than eight bits fill whole bytes on each rank alone:
every rank sends as many bytes as the first, which has most, and each rank's part is decoded by itself.

A hook that is given the mesh alone may send tensors of any size; with torch's longer signature they would
have to have the shard's shape, which packed codes have not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.writeback.sharding import local, wrap_rows
from halfulp.writeback.storage.native_weight import NativeCodes
from halfulp.writeback.storage.packed import Codes, code_bytes, pack_bits, shell, unpack_bits
from halfulp.writeback.storage.packed_view import is_closed
from halfulp.writeback.storage.unbacked import is_view, written

CODES, SCALES = ("codes", "resting"), ("steps", "resting_steps")
"""The names under which a packed slot keeps its codes, and the scales of moving grids."""


class PackedShard(torch.Tensor):
    """One number in the shape of a shard, with its codes and the methods that gather them.

    Nothing is written to it or to a view of it, and reading it outside a forward returns NaN.
    """

    number: torch.Tensor
    codes: Codes
    whole: torch.Size
    ranks: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # operations give plain tensors

    @classmethod
    def of(cls, number: torch.Tensor, codes: Codes, whole: torch.Size, ranks: int) -> PackedShard:
        """Wrap the packed codes of a part."""
        shard = number.as_subclass(cls)
        shard.number, shard.codes, shard.whole, shard.ranks = number, codes, whole, ranks
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, cls) for x in written(func, args, kwargs)):
            raise UsageError(
                f"{func} would write to a shard that is packed, which has codes and no values. Load them "
                "with set_model_state_dict, or write them before WriteBack is made."
            )
        plain_args, plain_kwargs = tree_map_only(cls, lambda x: x.number, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not is_view(func) or not isinstance(args[0], cls):
            return result
        first = args[0]
        return tree_map_only(torch.Tensor, lambda x: cls.of(x, first.codes, first.whole, first.ranks), result)

    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        """Return this rank's codes and scales, each padded to the bytes of the first rank."""
        longest = self._shape(0)
        parts = [(self.codes.packed, code_bytes(self.codes.grid, longest))]
        if self.codes.scales is not None:
            scales = self.codes.scales.clone(memory_format=torch.contiguous_format)
            size = scale_count(self.codes.grid, longest) * scales.element_size()
            parts.append((scales.view(torch.uint8), size))
        padded = [torch.nn.functional.pad(part, (0, size - part.numel())) for part, size in parts]
        return (padded[0] if len(padded) == 1 else torch.cat(padded),), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        _metadata: None,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Decode the whole weight, rank by rank, in the type that FSDP2 computes in.

        From the second time on it goes into ``out``, which autograd must not take for a change.
        """
        into = torch.empty(self.whole, dtype=dtype, device=self.device) if out is None else out
        with torch.no_grad(), _unsafe_preserve_version_counter(into):
            row = 0
            for rank, sent in enumerate(outputs[0].view(self.ranks, outputs[0].numel() // self.ranks)):
                codes = self._received(self._shape(rank), sent)
                if codes.shape[0]:
                    into[row : row + codes.shape[0]].copy_(codes.get(self.dtype))
                    row += codes.shape[0]
        return (into, (into,)) if out is None else None

    def _shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard: as many rows as the first rank, while any are left."""
        most = -(-self.whole[0] // self.ranks)
        return min(max(self.whole[0] - rank * most, 0), most), *self.whole[1:]

    def _received(self, shape: tuple[int, ...], sent: torch.Tensor) -> Codes:
        """Copy what a rank sent, because torch cannot free memory as FSDP2 does once NumPy has seen it."""
        grid, scales, first = self.codes.grid, None, code_bytes(self.codes.grid, self._shape(0))
        if self.codes.scales is not None:
            count = scale_count(grid, shape) * self.codes.scales.element_size()
            scales = sent[first : first + count].clone().view(self.codes.scales.dtype)
        packed = sent[: code_bytes(grid, shape)].clone()
        return Codes(grid=grid, shape=shape, packed=packed, scales=scales)


def is_packed(p: torch.Tensor) -> bool:
    """Return True if a parameter, or its local shard, is packed already."""
    return is_closed(p) or isinstance(local(p), PackedShard)


def scale_count(grid: Grid, shape: tuple[int, ...]) -> int:
    """Return the number of scales that a tensor of this shape has."""
    return 0 if grid.scaling is None else grid.scaling.segments(shape)


# ---- FSDP2's own record of a parameter --------------------------------------------------------------


def record_of(model: torch.nn.Module | None, p: torch.Tensor) -> Any:
    """Return FSDP2's record of a sharded parameter, which is private to torch.

    Refuse a parameter that has none, or of which FSDP2 would not ask the shard what to gather.
    """
    for record in _records(model):
        if record.sharded_param is not p:
            continue
        if record.sharded_state.name != "SHARDED":
            raise UsageError(
                "FSDP2 holds it gathered at the moment, and would go on with those values: call reshard() on "
                "its module before WriteBack is made."
            )
        if record.offload_to_cpu:
            raise UsageError(
                "storage='packed' does not go with CPUOffloadPolicy, which moves shards as values. Leave "
                "the policy out (packed shards are small), or storage=."
            )
        after = record.post_forward_mesh_info
        if after is not None and after != record.mesh_info:
            raise UsageError(
                "storage='packed' does not go with reshard_after_forward=NUMBER, which shards the gathered "
                "values again: FSDP2 cannot ask those what to gather. Use True or False."
            )
        return record
    raise UsageError(
        "storage='packed' on shards is for those of FSDP2, whose gathers can be asked for codes; this one is "
        "not of a module in model= that went through fully_shard. Leave storage= out."
    )


def _records(model: torch.nn.Module | None) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    records: list[Any] = []
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # in newer torch; before, one or none
            for group in [state._fsdp_param_group] if groups is None else groups:
                records += [] if group is None else group.fsdp_params
    return records


class ShardPlace:
    """The place where FSDP2 holds a shard.

    Opened, it has values, for state dictionaries; closed, it holds only a :class:`PackedShard`.
    """

    def __init__(self, p: torch.nn.Parameter, record: Any, codes: Codes) -> None:
        sharded: Any = p
        self.p, self.record = sharded, record
        self._looked = 0
        number = shell(local(p.detach()))
        placed = enumerate(sharded.placements)
        ranks = math.prod(sharded.device_mesh.size(dim) for dim, place in placed if place.is_shard())
        self.shard = PackedShard.of(number, codes, p.shape, ranks)
        self.flat = number.as_strided((number.numel(),), (0,))
        self.close()
        # After a forward, FSDP2 has made room for values as they come. It makes it anew, for codes.
        record._init_extensions()
        record.all_gather_outputs = []
        if hasattr(record, "_unsharded_param"):
            del record._unsharded_param

    def open(self, values: torch.Tensor) -> None:
        """Put the values in the place of the codes."""
        self.p._local_tensor = values

    def close(self) -> None:
        """Close the shard, and give FSDP2's flat view of it the same single number.

        FSDP2 compares the memory of both, and would otherwise take the shell for new values.
        """
        self.p._local_tensor = self.shard
        self.record._sharded_param_data = self.flat

    @property
    def version(self) -> tuple[int, int]:
        """Never the same twice: torch does not count writes through a DTensor, so values are compared."""
        self._looked += 1
        return 0, self._looked


# ---- in checkpoints ---------------------------------------------------------------------------------


def to_rows(codes: Codes | NativeCodes, kept: Mapping[str, torch.Tensor], p: Any) -> dict[str, torch.Tensor]:
    """Return codes and scales of a shard as rows of the whole tensor.

    So a checkpoint can be read by other numbers of ranks: a code takes a byte (two and more bytes: four).
    """
    out = {}
    for key in (k for k in CODES if k in kept):
        out[key] = unpack_bits(kept[key], codes.grid.bits, math.prod(codes.shape)).reshape(codes.shape)
    for key in (k for k in SCALES if k in kept):
        scaling, rows = codes.grid.scaling, codes.shape[0]
        assert scaling is not None
        one = scaling.per == "tensor"
        scales = kept[key].expand(rows).clone() if one else kept[key]
        out[key] = scales.reshape(rows, 1 if one else scaling.segments((1, *codes.shape[1:])))
    return {key: wrap_rows(value, p) for key, value in out.items()}


def from_rows(codes: Codes | NativeCodes, key: str, rows: torch.Tensor) -> torch.Tensor:
    """Invert :func:`to_rows`, for the rows on this rank."""
    if key in CODES:
        return pack_bits(rows, codes.grid.bits)
    if key in SCALES:
        return rows.reshape(-1)[: scale_count(codes.grid, codes.shape)]
    return rows
