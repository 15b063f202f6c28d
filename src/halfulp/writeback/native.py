"""Weights that live as float8 codes: one byte each between steps, and no copy in float32 anywhere.

A :class:`NativeWeight` is a tensor subclass around ``float8_e4m3fn`` codes and one scale. torch takes it for
a float32 parameter, so gradients are float32, ``state_dict``, ``deepcopy``, ``torch.save``,
``torch.distributed.checkpoint``, ``torch.compile``, DDP and FSDP2 have one thing to handle, and FSDP2 gathers
bytes. (A plain parameter of type float8 would do until FSDP2: it wants one type for all parameters of a group
and casts reduced gradients to it.) :func:`native` puts a model's matrices into this form; a
:class:`halfulp.WriteBack` around the optimizer then moves them under any policy.

``F.linear`` with such a weight is a native product (:mod:`halfulp.writeback.gemm`), ``F.embedding`` decodes
the rows that it picks. What keeps the form (a view, a slice, a copy to a device) gives a ``NativeWeight``;
whatever else reads one gets its values in float32. In place only ``copy_``, ``w[...] =`` and ``w.data =``
write to it, rounding to the nearest: an optimizer that adds to it directly is refused, because nearly all of
what it adds would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.grids import grid as named
from halfulp.writeback import gemm
from halfulp.writeback.sharding import is_sharded, local

CODES = torch.float8_e4m3fn
SCALE = "_scale"
"""In a flat state, what follows the name of a weight whose codes it scales: ``weight``, ``weight_scale``."""

aten = torch.ops.aten


class NativeWeight(torch.Tensor):
    """Codes in float8_e4m3fn times a scale, in the place of a float32 tensor of the same shape."""

    codes: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> NativeWeight:
        made: NativeWeight = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), storage_offset=codes.storage_offset(),
            dtype=torch.float32, layout=codes.layout, device=codes.device, requires_grad=False,
        )  # fmt: skip
        return made

    def __init__(self, codes: torch.Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    def decoded(self) -> torch.Tensor:
        """The values, in a fresh float32 tensor."""
        return self.codes.float() * self.scale

    def __setitem__(self, at: Any, value: Any) -> None:
        """Write some of the values; all are coded again, which leaves the others as they are."""
        values = self.decoded()
        values[at] = plain(value) if isinstance(value, torch.Tensor) else value
        self.copy_(values)

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]  # torch's own

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Codes of other values: torch would give a memory to the shape that is shown, which has none."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Without the gradient, as torch copies parameters."""
        if id(self) not in memo:
            made: torch.Tensor = NativeWeight(self.codes.detach().clone(), self.scale)
            if isinstance(self, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
            memo[id(self)] = made
        found: torch.Tensor = memo[id(self)]
        return found

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
        """The bytes of this shard, with as many rows as the longest has."""
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
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            return rule(func, *args, **kwargs)
        if func._schema.is_mutable and any(isinstance(a, cls) for a in _written(func, args, kwargs)):
            raise UsageError(
                f"{func} would change a native weight in place, and most of a small change would be rounded "
                "away: let hu.WriteBack step it, or write all of it with copy_()."
            )
        return func(
            *tree_map_only(NativeWeight, NativeWeight.decoded, args),
            **tree_map_only(NativeWeight, NativeWeight.decoded, kwargs),
        )


torch.serialization.add_safe_globals([NativeWeight])


def _weight(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NativeWeight | None:
    found = args[1] if len(args) > 1 else kwargs.get("weight")
    return found if isinstance(found, NativeWeight) else None


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
        raise UsageError("an embedding of native weights has no max_norm and no sparse gradient.")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    found: torch.Tensor = gemm.EmbeddedRows.apply(  # type: ignore[no-untyped-call]  # torch's
        input, weight, -1 if padding_idx is None else padding_idx, scale_grad_by_freq
    )
    return found


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to; lists of tensors are looked into."""
    found: list[Any] = []
    for i, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(declared.name)
            found += value if isinstance(value, list | tuple) else [value]
    return found


# ---- operators that keep the form -------------------------------------------------------------------


def _same(func: Any, w: NativeWeight, *args: Any, **kwargs: Any) -> NativeWeight:
    return NativeWeight(func(w.codes, *args, **kwargs), w.scale)


def _parts(func: Any, w: NativeWeight, *args: Any, **kwargs: Any) -> list[NativeWeight]:
    return [NativeWeight(part, w.scale) for part in func(w.codes, *args, **kwargs)]


def _fresh(func: Any, w: NativeWeight, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """``new_zeros`` and the like: codes again, unless a type is asked for."""
    if dtype is None:
        return NativeWeight(func(w.codes, *args, **kwargs), w.scale)
    made: torch.Tensor = func(w.codes, *args, dtype=dtype, **kwargs)
    return made


def _like(func: Any, w: NativeWeight, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """``zeros_like`` and the like: plain, as an optimizer wants its moments."""
    made: torch.Tensor = func(w.codes, *args, dtype=dtype or torch.float32, **kwargs)
    return made


def _to(func: Any, w: NativeWeight, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """To a device as codes; to another type as values."""
    if dtype in (None, torch.float32):
        return NativeWeight(func(w.codes, *args, **kwargs), w.scale)
    made: torch.Tensor = func(w.decoded(), *args, dtype=dtype, **kwargs)
    return made


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
    """Codes of the nearest values; a scale is a power of two, so dividing by it is exact."""
    if values.is_meta:
        return torch.empty(values.shape, dtype=CODES, device="meta")
    return kernels.round(values.float(), _grid_of(scale)).div(scale).to(CODES)


def _grid_of(scale: float) -> Grid:
    return named("e4m3" if scale == 1.0 else f"e4m3@{1 / scale:g}")


def scale_of(grid: Grid | str | torch.dtype) -> float:
    """What codes are multiplied by on a grid; refused where float8_e4m3fn codes are not its codes.

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
    """Whether a parameter, or the shard of it that is here, lives as float8 codes."""
    return isinstance(local(p), NativeWeight)


def plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor's values; those of a native weight are decoded into a fresh tensor."""
    return x.decoded() if isinstance(x, NativeWeight) else x


@torch.no_grad()
def native(
    model: torch.nn.Module,
    grid: Grid | str | torch.dtype = "e4m3@128",
    *,
    select: Callable[[str, torch.Tensor], bool] | None = None,
) -> list[str]:
    """Store a model's matrices as float8 codes, rounded to the nearest; gives the names of those stored so.

    ``select(name, parameter)`` chooses; by default every trainable matrix of float32. Before an optimizer is
    made and before ``fully_shard``, because parameters are replaced; a tied one is replaced everywhere.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 32))
    >>> native(model)
    ['0.weight', '1.weight']
    >>> model[1].weight.codes.dtype, model[1].weight.shape
    (torch.float8_e4m3fn, torch.Size([32, 16]))
    """
    scale = scale_of(grid)
    chosen = {
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
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) in chosen and id(p) not in made:
                weight = NativeWeight(encoded(p.detach(), scale), scale)
                made[id(p)] = torch.nn.Parameter(weight, requires_grad=p.requires_grad)
            if id(p) in chosen:
                setattr(module, key, made[id(p)])
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
    """A state dictionary of plain tensors: codes in float8, and beside each its ``_scale``, as safetensors
    and inference engines take them."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, NativeWeight):
            flat[name] = value.codes
            flat[name + SCALE] = torch.tensor(value.scale, dtype=torch.float32, device="cpu")
        else:
            flat[name] = value
    return flat


def native_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The other way: what ``load_state_dict`` of a native model takes."""
    scales = {name for name in flat if name.removesuffix(SCALE) != name and _is_codes(flat, name)}
    return {
        name: NativeWeight(value, float(flat[name + SCALE])) if name + SCALE in scales else value
        for name, value in flat.items()
        if name not in scales
    }


def _is_codes(flat: Mapping[str, Any], scale: str) -> bool:
    found = flat.get(scale.removesuffix(SCALE))
    return isinstance(found, torch.Tensor) and found.dtype == CODES


class NativeCodes:
    """The codes of a native parameter, as a write-back reads and writes them: those in the model itself."""

    scales = None

    def __init__(self, p: torch.nn.Parameter, grid: Grid) -> None:
        self.p, self.grid = p, grid

    @property
    def shape(self) -> tuple[int, ...]:
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
        return self.packed.numel()

    @property
    def _weight(self) -> NativeWeight:
        found = local(self.p.detach())
        assert isinstance(found, NativeWeight)
        return found

    def put(self, values: torch.Tensor, _scales: torch.Tensor | None = None) -> None:
        """Keep grid values."""
        weight = self._weight
        weight.codes.copy_(values.div(weight.scale).to(CODES))

    def get(self, packed: torch.Tensor | None = None) -> torch.Tensor:
        """The values in float32, in a fresh tensor; or those of other codes."""
        weight = self._weight
        if packed is not None:
            weight = NativeWeight(packed.view(CODES).view(self.shape), weight.scale)
        return weight.decoded()
