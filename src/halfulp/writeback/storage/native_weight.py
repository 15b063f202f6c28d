"""Store weights as float8 codes: one byte each between steps, and no float32 copy anywhere.

A :class:`NativeWeight` is a tensor subclass around ``float8_e4m3fn`` codes and one scale. torch takes it for
a float32 parameter, so gradients are float32, ``state_dict``, ``deepcopy``, ``torch.save``,
``torch.distributed.checkpoint``, ``torch.compile``, DDP and FSDP2 have one object to handle, and FSDP2
gathers bytes. (A plain float8 parameter would work except for FSDP2, which needs one type for all parameters
of a group and casts reduced gradients to it.) :func:`native` converts a model's matrices to this form; a
:class:`halfulp.WriteBack` around the optimizer then moves them under any policy.

``F.linear`` with such a weight is a native product (:mod:`halfulp.writeback.storage.native_products`);
``F.embedding`` decodes the rows that it picks. Operations that keep the form (a view, a slice, a copy to a
device) return a ``NativeWeight``; all others get its values in float32. Only ``copy_``, ``w[...] =`` and
``w.data =`` write to it in place, rounding to nearest. An optimizer that adds to it directly is refused,
because nearly all of its updates would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.writeback.sharding import is_sharded, local
from halfulp.writeback.storage import native_products as gemm
from halfulp.writeback.storage.unbacked import Unbacked, written

CODES = torch.float8_e4m3fn
SCALE = "_scale"
"""In a flat state, what follows the name of a weight whose codes it scales: ``weight``, ``weight_scale``."""

aten = torch.ops.aten


class NativeWeight(Unbacked):
    """A tensor of float8_e4m3fn codes times a scale that stands for a float32 tensor of the same shape."""

    codes: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> NativeWeight:
        """Wrap codes as a float32 weight."""
        weight: NativeWeight = cls.like(codes, torch.float32, codes.device)
        return weight

    def __init__(self, codes: torch.Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    def decoded(self) -> torch.Tensor:
        """Return the values in a new float32 tensor."""
        return self.codes.float() * self.scale

    def __setitem__(self, at: Any, value: Any) -> None:
        """Write some of the values; all are coded again, which leaves the others as they are."""
        values = self.decoded()
        values[at] = plain(value) if isinstance(value, torch.Tensor) else value
        self.copy_(values)

    @property
    def data(self) -> Any:
        """Return what ``torch.Tensor.data`` returns."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]  # torch's own

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Encode other values; torch would give memory to the shape that is shown, which has none."""
        if value.shape != self.shape:
            raise UsageError(
                f"a native weight of shape {list(self.shape)} cannot get values of shape "
                f"{list(value.shape)}: decode it (w.decoded()), or make the model anew."
            )
        if value.dtype != self.dtype:  # model.bfloat16(): the type that is shown
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # torch's own
        self.detach().copy_(value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has options
        return f"NativeWeight({tuple(self.shape)}, scale={self.scale:g}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy without the gradient, as torch copies parameters."""
        if id(self) not in memo:
            copy = NativeWeight(self.codes.detach().clone(), self.scale)
            own = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, requires_grad=self.requires_grad) if own else copy
        return memo[id(self)]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Return what torch would, if it could query the address to learn that there is none."""
        shown = (
            type(self), self.dtype, tuple(self.shape), self.stride(), self.storage_offset(), self.layout,
            self.device, self.requires_grad,
        )  # fmt: skip
        state = {k: v for k, v in vars(self).items() if k != "nowhere"}
        rebuilt = (torch._utils._rebuild_wrapper_subclass, type(self), shown, state)
        return torch._tensor._rebuild_from_type_v2, rebuilt

    # ---- what torch.compile and FSDP2 ask ----

    def _stable_hash_for_caching(self) -> str:
        return f"NativeWeight {self.scale}"

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["codes"], self.scale

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], scale: float, _size: Any = None, _stride: Any = None
    ) -> NativeWeight:
        return cls(inner["codes"], scale)

    def fsdp_pre_all_gather(
        self, mesh: Any, size: torch.Size, _stride: Any, _module: Any, _mixed: Any
    ) -> tuple[tuple[torch.Tensor, ...], float]:
        """Return the bytes of this shard, padded to the rows of the longest shard."""
        here = self.codes.view(torch.uint8)
        more = -(-size[0] // mesh.size()) - here.shape[0]
        return (torch.nn.functional.pad(here, (0, 0, 0, more)) if more else here,), self.scale

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        scale: float,
        _dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Wrap the gathered codes, as FSDP2 asks."""
        (gathered,) = outputs
        if out is not None:
            return None  # its codes are a view of what was gathered again
        return NativeWeight(gathered.view(CODES), scale), (gathered,)

    # ---- operations ----

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and _weight(args, kwargs) is not None:
            return _linear(*args, **kwargs)
        if func is torch.nn.functional.embedding and _weight(args, kwargs) is not None:
            return _embedding(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            return rule(func, *args, **kwargs)
        if func._schema.is_mutable and any(isinstance(a, cls) for a in written(func, args, kwargs)):
            raise UsageError(
                f"{func} would change a native weight in place, and most of a small change would be rounded "
                "away: let hu.WriteBack step it, or write all of it with copy_()."
            )
        args, kwargs = tree_map_only(NativeWeight, NativeWeight.decoded, (args, kwargs))
        return func(*args, **kwargs)


torch.serialization.add_safe_globals([NativeWeight])


def _weight(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NativeWeight | None:
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    return weight if isinstance(weight, NativeWeight) else None


def _linear(input: torch.Tensor, weight: NativeWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    out: torch.Tensor = gemm.Linear.apply(input, weight)  # type: ignore[no-untyped-call]  # torch's
    return out if bias is None else out + bias


def _embedding(
    input: torch.Tensor,
    weight: NativeWeight,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None or sparse:
        raise UsageError(
            "an embedding with native weights takes no max_norm and no sparse gradients: leave them out."
        )
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    rows: torch.Tensor = gemm.EmbeddedRows.apply(  # type: ignore[no-untyped-call]  # torch's
        input, weight, -1 if padding_idx is None else padding_idx, scale_grad_by_freq
    )
    return rows


# ---- operators that keep the form -------------------------------------------------------------------


def _same(func: Any, w: NativeWeight, *args: Any, **kwargs: Any) -> NativeWeight:
    return NativeWeight(func(w.codes, *args, **kwargs), w.scale)


def _parts(func: Any, w: NativeWeight, *args: Any, **kwargs: Any) -> list[NativeWeight]:
    return [NativeWeight(part, w.scale) for part in func(w.codes, *args, **kwargs)]


def _fresh(func: Any, w: NativeWeight, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Answer ``new_zeros`` and its kin with codes, unless a dtype is given."""
    if dtype is None:
        return _same(func, w, *args, **kwargs)
    return func(w.codes, *args, dtype=dtype, **kwargs)


def _like(func: Any, w: NativeWeight, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Answer ``zeros_like`` and its kin with plain tensors, as an optimizer wants its moments."""
    return func(w.codes, *args, dtype=dtype or torch.float32, **kwargs)


def _to(func: Any, w: NativeWeight, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Move codes to a device; cast values to another dtype."""
    if dtype in (None, torch.float32):
        return _same(func, w, *args, **kwargs)
    return func(w.decoded(), *args, dtype=dtype, **kwargs)


def _copy(func: Any, into: torch.Tensor, source: torch.Tensor, *args: Any) -> torch.Tensor:
    if not isinstance(into, NativeWeight):
        assert isinstance(source, NativeWeight)
        func(into, source.decoded(), *args)
    elif isinstance(source, NativeWeight) and source.scale == into.scale:
        func(into.codes, source.codes, *args)
    else:
        values = source.decoded() if isinstance(source, NativeWeight) else source
        into.codes.copy_(encoded(values.expand(into.shape), into.scale), *args)
    return into


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.clone.default, aten.view.default,
         aten._unsafe_view.default, aten.as_strided.default, aten.slice.Tensor, aten.select.int,
         aten.t.default, aten.transpose.int, aten.permute.default, aten._pin_memory.default),
        _same,
    ),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default), _parts),
    **dict.fromkeys((aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default), _fresh),
    **dict.fromkeys(
        (aten.zeros_like.default, aten.empty_like.default, aten.ones_like.default, aten.full_like.default,
         aten.rand_like.default, aten.randn_like.default), _like,
    ),
    aten._to_copy.default: _to,
    aten.copy_.default: _copy,
}  # fmt: skip


# ---- making them ------------------------------------------------------------------------------------


def encoded(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the codes of the nearest values; a scale is a power of two, so dividing by it is exact."""
    if values.is_meta:
        return torch.empty(values.shape, dtype=CODES, device="meta")
    grid = named("e4m3" if scale == 1.0 else f"e4m3@{1 / scale:g}")
    return kernels.round(values.float(), grid).div(scale).to(CODES)


def scale_of(grid: Grid | str | torch.dtype) -> float:
    """Return the factor of float8_e4m3fn codes on a grid; refuse a grid whose codes are not those.

    >>> scale_of("e4m3@128")
    0.0078125
    """
    g = named(grid)
    scale = None if g.largest is None or g.scaling is not None else g.largest / 448.0
    fits = scale and math.frexp(scale)[0] == 0.5 and (g.mantissa, g.emin) == (3, -6 + round(math.log2(scale)))
    if scale is None or not fits:
        raise UsageError(
            f"native weights are float8_e4m3fn codes times a fixed power of two, which grid {g.name} is not: "
            "use e4m3 or e4m3@128."
        )
    return scale


def is_native(p: torch.Tensor) -> bool:
    """Return True if a parameter, or its local shard, is stored as float8 codes."""
    return isinstance(local(p), NativeWeight)


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values; those of a native weight are decoded into a new tensor."""
    return x.decoded() if isinstance(x, NativeWeight) else x


@torch.no_grad()
def native(
    model: torch.nn.Module,
    grid: Grid | str | torch.dtype = "e4m3@128",
    *,
    select: Callable[[str, torch.Tensor], bool] | None = None,
) -> list[str]:
    """Convert a model's matrices to float8 codes, rounded to nearest.

    Call it before you make an optimizer and before ``fully_shard``, because it replaces parameters. A tied
    parameter is replaced everywhere.

    Args:
        model: The model; it is changed in place.
        grid: ``e4m3``, or ``e4m3@`` a power of two.
        select: A function of name and parameter that chooses; by default every trainable float32 matrix.

    Returns:
        The names of the converted parameters.

    Raises:
        UsageError: If the grid is another one, if nothing is chosen, or if a chosen parameter is sharded,
            native already, not a float32 matrix, or not finite. In that case nothing has been changed.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 32))
    >>> native(model)
    ['0.weight', '1.weight']
    >>> model[1].weight.codes.dtype, model[1].weight.shape
    (torch.float8_e4m3fn, torch.Size([32, 16]))
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"halfulp.native takes a torch.nn.Module, not {type(model).__name__}.")
    scale = scale_of(grid)
    chosen = {  # by number, so that each is freed when it is replaced
        id(p): name
        for name, p in model.named_parameters()
        if (select(name, p) if select else p.requires_grad and p.dim() == 2 and p.dtype == torch.float32)
    }
    if not chosen:
        raise UsageError(
            "no parameter to store natively: none is a trainable float32 matrix, or select= chose none."
        )
    for name, p in model.named_parameters():
        if id(p) in chosen:
            _check(name, p)
    replaced: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) in chosen and id(p) not in replaced:
                weight = NativeWeight(encoded(p.detach(), scale), scale)
                replaced[id(p)] = torch.nn.Parameter(weight, requires_grad=p.requires_grad)
            if id(p) in chosen:
                setattr(module, key, replaced[id(p)])
    return list(chosen.values())


def _check(name: str, p: torch.Tensor) -> None:
    """Refuse what cannot be stored, before anything is changed."""
    if is_sharded(p):
        raise UsageError(f"parameter {name!r} is sharded: call hu.native(model) before fully_shard(model).")
    if is_native(p):
        raise UsageError(f"parameter {name!r} is native already.")
    if p.dim() != 2 or p.dtype != torch.float32:
        raise UsageError(
            f"parameter {name!r} is {p.dtype} of {p.dim()} dimensions: native weights are float32 matrices."
        )
    if p.device.type == "cuda" and any(size % 16 for size in p.shape):
        raise UsageError(
            f"parameter {name!r} is {tuple(p.shape)}: CUDA's float8 products take multiples of 16. "
            "Leave it out with select=, or pad it."
        )
    if not p.is_meta and not bool(torch.isfinite(p).all()):
        raise UsageError(f"parameter {name!r} has values that are not finite: they have no code.")


# ---- states as plain tensors ------------------------------------------------------------------------


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dictionary of plain tensors, as safetensors and inference engines take it.

    It has codes in float8, and beside each its ``_scale``.
    """
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, NativeWeight):
            flat[name] = value.codes
            flat[name + SCALE] = torch.tensor(value.scale, dtype=torch.float32, device="cpu")
        else:
            flat[name] = value
    return flat


def native_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert :func:`flat_state`: return what ``load_state_dict`` of a native model takes."""
    codes = {k for k, x in flat.items() if isinstance(x, torch.Tensor) and x.dtype == CODES}
    scales = {name + SCALE for name in codes} & set(flat)
    return {
        name: NativeWeight(value, float(flat[name + SCALE])) if name + SCALE in scales else value
        for name, value in flat.items()
        if name not in scales
    }


class NativeCodes:
    """The codes of a native parameter, as a write-back reads and writes them: those in the model itself."""

    scales = None

    def __init__(self, p: torch.nn.Parameter, grid: Grid) -> None:
        self.p, self.grid = p, grid

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return tuple(local(self.p).shape)

    @property
    def packed(self) -> torch.Tensor:
        """This rank's codes as bytes, flat, sharing memory."""
        return self._weight.codes.view(torch.uint8).view(-1)

    @packed.setter
    def packed(self, codes: torch.Tensor) -> None:
        self.packed.copy_(codes)

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of the codes."""
        return self.packed.numel()

    @property
    def _weight(self) -> NativeWeight:
        weight = local(self.p.detach())
        assert isinstance(weight, NativeWeight)
        return weight

    def put(self, values: torch.Tensor, _scales: torch.Tensor | None = None) -> None:
        """Store grid values."""
        weight = self._weight
        weight.codes.copy_(values.div(weight.scale).to(CODES))

    def get(self, packed: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values, or those of other codes, in a new float32 tensor."""
        weight = self._weight
        if packed is not None:
            weight = NativeWeight(packed.view(CODES).view(self.shape), weight.scale)
        return weight.decoded()
