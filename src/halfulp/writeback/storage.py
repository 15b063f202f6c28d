"""Where stored weights live between steps.

``container``
    The parameter itself (float32, float64) holds grid values, as in the paper.
``native``
    The parameter is bfloat16 or float16 itself; the optimizer is given a float32 stand-in for the
    length of a step (:mod:`halfulp.writeback.standin`), or it would round before a policy sees anything.
``packed``
    The persistent state is codes, packed to the bit; the parameter is an empty shell of the right
    shape. A module's weights are decoded when its forward runs and dropped when it ends; what
    autograd saved of them is decoded again in the backward, one tensor at a time. Outside its own
    module's forward (a parent that reads ``self.child.weight``) a packed weight reads as NaN.
    On shards, FSDP2 gathers the codes: see :mod:`halfulp.writeback.shards`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from halfulp import kernels
from halfulp.errors import CorruptionError, UsageError
from halfulp.grids import Grid
from halfulp.writeback.sharding import local


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``bits`` bits each, one after another, lowest bit first, in whole bytes.

    Codes of 9 to 15 bits go in two runs: their low bytes, then what is above them.

    >>> pack_bits(torch.tensor([1, 2, 3]), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    flat = codes.reshape(-1)
    if bits == 8:
        return flat.to(torch.uint8)
    if bits == 16:
        return flat.to(torch.int32).to(torch.int16).view(torch.uint8)
    if bits > 8:
        return torch.cat([pack_bits(flat & 255, 8), pack_bits(flat >> 8, bits - 8)])
    per = 8 // math.gcd(bits, 8)  # codes that fill whole bytes
    padded = torch.nn.functional.pad(flat.long(), (0, -flat.numel() % per)).reshape(-1, per)
    word = sum((padded[:, i] << (bits * i) for i in range(per)), padded.new_zeros(len(padded)))
    parts = torch.stack([(word >> (8 * i)) & 255 for i in range(per * bits // 8)], dim=1)
    return parts.reshape(-1)[: math.ceil(flat.numel() * bits / 8)].to(torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """The codes again, as uint8 or int32.

    >>> unpack_bits(torch.tensor([33, 3], dtype=torch.uint8), 4, 3)
    tensor([1, 2, 3], dtype=torch.uint8)
    """
    if bits == 8:
        return packed[:numel]
    if bits == 16:
        return packed.view(torch.int16).to(torch.int32) & 0xFFFF
    if bits > 8:
        return packed[:numel].to(torch.int32) | (
            unpack_bits(packed[numel:], bits - 8, numel).to(torch.int32) << 8
        )
    per = 8 // math.gcd(bits, 8)
    size = per * bits // 8
    padded = torch.nn.functional.pad(packed.long(), (0, -packed.numel() % size)).reshape(-1, size)
    word = sum((padded[:, i] << (8 * i) for i in range(size)), padded.new_zeros(len(padded)))
    codes = torch.stack([(word >> (bits * i)) & (2**bits - 1) for i in range(per)], dim=1)
    return codes.reshape(-1)[:numel].to(torch.uint8)


@dataclass(kw_only=True)
class Codes:
    """One tensor as packed codes and, for moving grids, their scales."""

    grid: Grid
    shape: tuple[int, ...]
    packed: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    scales: torch.Tensor | None = None

    @property
    def payload_bytes(self) -> int:
        return self.packed.numel() + (
            0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        )

    def put(self, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Keep grid values. ``scales`` are those they were rounded with: not every rule finds them again."""
        if scales is None and self.grid.scaling is not None:
            scales = kernels.scales(values, self.grid)
        packed = pack_bits(kernels.encode(values, self.grid, scale=scales), self.grid.bits)
        self.packed, self.scales = packed, scales  # both or, after an interrupt, neither

    def get(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, in a fresh tensor."""
        expected = math.ceil(math.prod(self.shape) * self.grid.bits / 8)
        if self.packed.numel() != expected or self.packed.dtype != torch.uint8:
            raise CorruptionError(
                f"packed codes of {self.grid.name} for shape {self.shape} take {expected} bytes, "
                f"but there are {self.packed.numel()} of {self.packed.dtype}."
            )
        codes = unpack_bits(self.packed, self.grid.bits, math.prod(self.shape)).reshape(self.shape)
        return kernels.decode(codes, self.grid, scale=self.scales, dtype=dtype)


def shell(p: torch.Tensor) -> torch.Tensor:
    """A tensor like p that takes the memory of one number."""
    return torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)


def is_shell(x: torch.Tensor) -> bool:
    """Whether a tensor has the memory of one number, and more places than that."""
    return x.numel() > 1 and not any(step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)


Own = dict[torch.nn.Parameter, str]
"""A module's packed parameters and their names."""
CONTAINERS = (torch.nn.ParameterList, torch.nn.ParameterDict, torch.nn.ModuleList, torch.nn.ModuleDict)


class _Hook:
    """A hook of a model with packed weights. Such a model is neither copied nor pickled whole: the copy would
    have shells without codes."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise UsageError(
            "a model whose weights are packed is not copied or pickled whole, because its codes are in the "
            "optimizer: save or load model.state_dict(), which has the values."
        )


class PackedPlace(Protocol):
    """Where a packed parameter is, and how it is given values for a while."""

    def open(self, values: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class Whole:
    """A parameter by itself: its data are a shell."""

    def __init__(self, p: torch.nn.Parameter) -> None:
        self.p = p
        self.close()

    def open(self, values: torch.Tensor) -> None:
        self.p.data = values

    def close(self) -> None:
        self.p.data = shell(self.p)
        self._at = self.p.data_ptr()

    @property
    def replaced(self) -> bool:
        """Whether somebody has given the parameter other data than the shell (a cast of that is nothing)."""
        return self.p.data_ptr() != self._at and not bool(self.p.detach().isnan().all())


def _owned(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """The parameters of a module itself. Attention reads the weight of its output projection without calling
    it."""
    return module.parameters(recurse=isinstance(module, torch.nn.MultiheadAttention))


def _read(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that a module's forward reads: its own, and those of containers without a forward."""
    yield from _owned(module)
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _read(child)


class Shells:
    """Keeps packed parameters of a model usable: decodes around forwards, backwards and state_dict."""

    def __init__(self) -> None:
        self._codes: dict[torch.nn.Parameter, Codes] = {}
        self._places: dict[torch.nn.Parameter, PackedPlace] = {}
        self._open: dict[torch.nn.Parameter, int] = {}
        self._handles: list[Any] = []
        self._contexts: list[Any] = []

    def add(self, p: torch.nn.Parameter, codes: Codes, place: PackedPlace) -> None:
        self._codes[p], self._places[p], self._open[p] = codes, place, 0

    def open(self, p: torch.nn.Parameter, name: str) -> None:
        if self._open[p] == 0:
            place = self._places[p]
            if isinstance(place, Whole) and place.replaced:
                self._keep(p, name)
            place.open(self._codes[p].get(p.dtype))
        self._open[p] += 1

    def close(self, p: torch.nn.Parameter) -> None:
        self._open[p] -= 1
        if self._open[p] == 0:
            self._places[p].close()

    def attach(self, model: torch.nn.Module, packed: list[torch.nn.Parameter]) -> None:
        """Hook every module that owns one of these packed parameters."""
        names = {p: name for name, p in model.named_parameters()}
        for module in model.modules():
            own = {p: names[p] for p in _owned(module) if p in set(packed)}
            read = {p: names[p] for p in _read(module) if p in set(packed)}
            whole = {p: name for p, name in read.items() if isinstance(self._places[p], Whole)}
            if whole:  # shards are decoded where FSDP2 gathers them
                before, after = _Hook(self._before(whole)), _Hook(self._after(whole))
                self._handles += [  # first of all: torch.nn.utils.weight_norm reads weights in a hook, too
                    module.register_forward_pre_hook(before, prepend=True),
                    module.register_forward_hook(after, always_call=True),
                ]
            if own:
                reading, saved, loaded = (_Hook(f(own)) for f in (self._reading, self._saved, self._loaded))
                self._handles += [
                    module.register_state_dict_pre_hook(reading),  # type: ignore[no-untyped-call]  # torch's
                    module.register_state_dict_post_hook(saved),  # type: ignore[no-untyped-call]  # torch's
                    module.register_load_state_dict_pre_hook(reading),  # type: ignore[no-untyped-call]  # torch's
                    module.register_load_state_dict_post_hook(loaded),  # type: ignore[no-untyped-call]  # torch's
                ]

    def _before(self, own: Own) -> Callable[..., None]:
        def hook(module: torch.nn.Module, _args: Any) -> None:
            for p, name in own.items():
                self.open(p, name)
            context = saved_tensors_hooks(self._pack, self._unpack)
            context.__enter__()
            self._contexts.append((module, context))

        return hook

    def _after(self, own: Own) -> Callable[..., None]:
        def hook(module: torch.nn.Module, _args: Any, _output: Any) -> None:
            if not self._contexts or self._contexts[-1][0] is not module:
                return  # an error before this module was opened
            self._contexts.pop()[1].__exit__(None, None, None)
            for p in own:
                self.close(p)

        return hook

    def _pack(self, saved: torch.Tensor) -> Any:
        """Remember which weight was saved, and how it was viewed, instead of its values."""
        for p in self._codes:
            if self._open[p] and saved.untyped_storage().data_ptr() == p.untyped_storage().data_ptr():
                return p, saved.shape, saved.stride(), saved.storage_offset(), saved.dtype
        return saved.detach()  # itself, as the output of its node, would be a cycle that nobody frees

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        p, shape, stride, offset, dtype = kept
        return self._codes[p].get(dtype).as_strided(shape, stride, offset)

    def _reading(self, own: Own) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for p, name in own.items():
                self.open(p, name)

        return hook

    def _saved(self, own: Own) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, state: dict[str, Any], _prefix: str, _meta: Any) -> None:
            addresses = {local(p).data_ptr() for p in own}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and local(value).data_ptr() in addresses:
                    state[key] = value.clone()
            for p in own:
                self.close(p)

        return hook

    def _loaded(self, own: Own) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            try:
                for p, name in own.items():
                    self._keep(p, name)
            finally:
                for p in own:
                    self.close(p)

        return hook

    def _keep(self, p: torch.nn.Parameter, name: str) -> None:
        """Encode what was loaded into a parameter, or set as its data; off the grid it is refused."""
        codes, values = self._codes[p], local(p.detach())
        if torch.equal(values, codes.get(p.dtype)):
            return
        fresh = Codes(grid=codes.grid, shape=codes.shape)
        fresh.put(torch.where(torch.isfinite(values), values, 0))
        off = int((fresh.get(p.dtype) != values).sum())
        if off:
            raise UsageError(
                f"parameter {name!r} is packed on grid {codes.grid.name}, but {off} of {values.numel()} "
                "values to load or set are off it. Load them before WriteBack is made, or its saved state "
                "first, which has the codes; or set grid.round(values)."
            )
        codes.packed, codes.scales = fresh.packed, fresh.scales
