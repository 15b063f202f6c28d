"""Store weights as codes packed to the bit, with parameters that are shells of the right shape.

:mod:`halfulp.writeback.storage` describes when weights are decoded, and
:mod:`halfulp.writeback.storage.packed_view` their use outside a module's forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks

from halfulp import kernels
from halfulp.errors import CorruptionError, UsageError
from halfulp.numbers.grids import Grid
from halfulp.writeback.sharding import local
from halfulp.writeback.storage.packed_view import closed, is_closed, opened
from halfulp.writeback.storage.unbacked import forbid_address

if TYPE_CHECKING:
    from halfulp.writeback.sharding.packed_shard import ShardPlace


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of ``bits`` bits one after another, lowest bit first, into whole bytes.

    Codes of 9 to 15 bits are packed in two runs: their low bytes, then the bits above.

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
    """Invert :func:`pack_bits`; return uint8 or int32.

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


def code_bytes(grid: Grid, shape: tuple[int, ...]) -> int:
    """Count the bytes of the packed codes of a tensor."""
    return math.ceil(math.prod(shape) * grid.bits / 8)


@dataclass(kw_only=True)
class Codes:
    """One tensor as packed codes and, for moving grids, their scales."""

    grid: Grid
    shape: tuple[int, ...]
    packed: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    scales: torch.Tensor | None = None

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.packed.numel() + (
            0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        )

    def put(self, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Store grid values; ``scales`` are those of their rounding, which not every rule can recompute."""
        if scales is None and self.grid.scaling is not None:
            scales = kernels.scales(values, self.grid)
        packed = pack_bits(kernels.encode(values, self.grid, scale=scales), self.grid.bits)
        self.packed, self.scales = packed, scales  # both or, after an interrupt, neither

    def get(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values in a new tensor."""
        expected = code_bytes(self.grid, self.shape)
        if self.packed.numel() != expected or self.packed.dtype != torch.uint8:
            raise CorruptionError(
                f"packed codes of {self.grid.name} for shape {self.shape} take {expected} bytes, "
                f"but there are {self.packed.numel()} of {self.packed.dtype}."
            )
        codes = unpack_bits(self.packed, self.grid.bits, math.prod(self.shape)).reshape(self.shape)
        return kernels.decode(codes, self.grid, scale=self.scales, dtype=dtype)


def shell(p: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape and type of p that takes the memory of one number."""
    return torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)


CONTAINERS = (torch.nn.ParameterList, torch.nn.ParameterDict, torch.nn.ModuleList, torch.nn.ModuleDict)


class _Hook:
    """A hook of a model with packed weights.

    Such a model is neither copied nor pickled whole: the copy would have shells without codes.
    """

    def __init__(self, call: Callable[..., None], weights: list[PackedWeight]) -> None:
        self._call = partial(call, weights)

    @_disable_dynamo  # weights come and go here, which is nothing to compile
    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise UsageError(
            "a model whose weights are packed is not copied or pickled whole, because its codes are in the "
            "optimizer: save or load model.state_dict(), which has the values."
        )


class Whole:
    """A parameter by itself: closed, its data are a shell that nothing can be written to.

    A shard is a :class:`~halfulp.writeback.sharding.packed_shard.ShardPlace`.
    """

    def __init__(self, p: torch.nn.Parameter) -> None:
        self.p, self.kind = p, type(p)
        self.close()

    def open(self, values: torch.Tensor) -> None:
        """Give the parameter its values."""
        self._set(values, opened(self.kind))

    def close(self) -> None:
        """Take the values away again, leaving a shell."""
        empty = shell(self.p)
        forbid_address(empty)
        self._set(empty, closed(self.kind))

    @contextmanager
    def laid_out(self) -> Iterator[None]:
        """Let a closed parameter show the strides of its values, which some functions reckon with."""
        empty = torch.empty(self.p.shape, dtype=self.p.dtype, device=self.p.device)
        empty.untyped_storage().resize_(0)
        forbid_address(empty)
        self._set(empty, closed(self.kind))
        try:
            yield
        finally:
            if is_closed(self.p):  # and was not opened meanwhile
                self.close()

    def _set(self, data: torch.Tensor, kind: type) -> None:
        """Set the parameter's data, and the class that goes with it."""
        self.p.__class__ = self.kind  # as torch does where it materialises one
        self.p.data = data
        self.p.__class__ = kind

    @property
    def version(self) -> tuple[int, int]:
        """The memory of an open parameter's values, and the number of changes that torch has seen."""
        return self.p.data_ptr(), self.p._version


class PackedWeight:
    """A packed parameter: its codes, and its values while it is open."""

    def __init__(self, p: torch.nn.Parameter, name: str, codes: Codes, place: Whole | ShardPlace) -> None:
        self.p, self.name, self.codes, self.place = p, name, codes, place
        self.users = 0
        if isinstance(place, Whole):
            p.packed = self  # type: ignore[attr-defined]  # where its operations find it

    def open(self) -> None:
        """Decode the values for one more user."""
        if self.users == 0:
            with torch.inference_mode(False):  # torch does not count what is written to an inference tensor
                self.place.open(self.values())
            self._opened = self.place.version
        self.users += 1

    def close(self) -> None:
        """Release the values; those written in the meantime are encoded or, if off the grid, refused."""
        self.users -= 1
        if self.users:
            return
        try:
            if self.place.version != self._opened:
                self.keep(local(self.p.detach()))
        finally:
            self.place.close()

    def values(self) -> torch.Tensor:
        """Decode the values, in the parameter's type."""
        return self.codes.get(self.p.dtype)

    def keep(self, values: torch.Tensor) -> None:
        """Encode values that were loaded, set or written in place; refuse those off the grid."""
        codes = self.codes
        if torch.equal(values, self.values()):
            return
        fresh = Codes(grid=codes.grid, shape=codes.shape)
        fresh.put(torch.where(torch.isfinite(values), values, 0))
        off = int((fresh.get(values.dtype) != values).sum())
        if off:
            raise UsageError(
                f"parameter {self.name!r} is packed on grid {codes.grid.name}, but {off} of {values.numel()} "
                "values to load or set are off it. Load them before WriteBack is made, or its saved state "
                "first, which has the codes; or set grid.round(values)."
            )
        codes.packed, codes.scales = fresh.packed, fresh.scales

    def assign(self, values: torch.Tensor) -> None:
        """Handle ``p.data = values``; another type means a cast of the weight (``model.bfloat16()``)."""
        values = values.detach() + 0 if type(values) is not torch.Tensor else values
        if values.shape != self.p.shape or values.device != self.p.device:
            raise UsageError(
                f"parameter {self.name!r} is packed, {list(self.p.shape)} on {self.p.device}, and cannot get "
                f"{list(values.shape)} on {values.device}: make a new model and optimizer for it."
            )
        if values.dtype == self.p.dtype:
            self.keep(values)
        elif torch.equal(values, self.values().to(values.dtype)):
            self.place.open(values)
            self.place.close()
        else:
            raise UsageError(
                f"parameter {self.name!r} is packed and shows {self.p.dtype}: other values cannot be set in "
                f"{values.dtype}."
            )


def _owned(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Return the parameters of a module itself. Attention reads its output projection without calling it."""
    return module.parameters(recurse=isinstance(module, torch.nn.MultiheadAttention))


def _read(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Find the parameters that a module's forward reads: its own, and those of containers in it."""
    yield from _owned(module)
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _read(child)


class Shells:
    """The hooks that decode a model's packed parameters for forwards, backwards and state_dict."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._weights: list[PackedWeight] = []
        self._contexts: list[Any] = []

    def attach(self, packed: list[PackedWeight]) -> None:
        """Hook every module that owns one of these packed parameters."""
        self._weights += packed
        new = {weight.p: weight for weight in packed}
        for module in self._model.modules() if self._model is not None and new else ():
            own = [new[p] for p in _owned(module) if p in new]
            read = dict.fromkeys(new[p] for p in _read(module) if p in new)
            whole = [weight for weight in read if isinstance(weight.place, Whole)]
            if whole:  # shards are decoded where FSDP2 gathers them
                # First of all: torch.nn.utils.weight_norm reads weights in a hook, too.
                module.register_forward_pre_hook(_Hook(self._before, whole), prepend=True)
                module.register_forward_hook(_Hook(self._after, whole), always_call=True)
            if own:
                hooked: Any = module  # these registrations have no types in torch
                hooked.register_state_dict_pre_hook(_Hook(_open, own))
                hooked.register_state_dict_post_hook(_Hook(_saved, own))
                hooked.register_load_state_dict_pre_hook(_Hook(_open, own))
                hooked.register_load_state_dict_post_hook(_Hook(_close, own))

    def _before(self, whole: list[PackedWeight], module: torch.nn.Module, _args: Any) -> None:
        if torch._C._is_tracing():
            raise UsageError(
                f"parameter {whole[0].name!r} is packed, and a traced module would keep what is there now, "
                "which are no values: load model.state_dict() into a model without WriteBack, and trace that."
            )
        _open(whole)
        context = saved_tensors_hooks(self._pack, self._unpack)
        context.__enter__()
        self._contexts.append((module, context))

    def _after(self, whole: list[PackedWeight], module: torch.nn.Module, *_: Any) -> None:
        if not self._contexts or self._contexts[-1][0] is not module:
            return  # an error before this module was opened
        self._contexts.pop()[1].__exit__(None, None, None)
        _close(whole)

    def _pack(self, saved: torch.Tensor) -> Any:
        """Remember which weight was saved, and how it was viewed, instead of its values."""
        address = saved.untyped_storage().data_ptr()
        for weight in self._weights:
            if weight.users and address == weight.p.untyped_storage().data_ptr():
                return weight, saved.shape, saved.stride(), saved.storage_offset(), saved.dtype
        return saved.detach()  # itself, as the output of its node, would be a cycle that nobody frees

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        weight, shape, stride, offset, dtype = kept
        values: torch.Tensor = weight.codes.get(dtype)
        return values.as_strided(shape, stride, offset)


def _open(weights: list[PackedWeight], *_: Any) -> None:
    for weight in weights:
        weight.open()


def _close(weights: list[PackedWeight], *_: Any) -> None:
    """Close all parameters, and then raise the first refusal."""
    refused = []
    for weight in weights:
        try:
            weight.close()
        except UsageError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _saved(weights: list[PackedWeight], _module: torch.nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Close all parameters; a state dictionary keeps the values."""
    addresses = {local(weight.p).data_ptr() for weight in weights}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and local(value).data_ptr() in addresses:
            state[key] = value.clone()
    _close(weights)
