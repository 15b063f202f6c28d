"""Prepare kernel calls: convert tensors to flat arrays, and grids to numbers.

A tensor of any shape, stride and device becomes one contiguous array, its own memory where possible. A grid
becomes a :class:`Plan`: resolved for the container, with its numbers for the working type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.kernels import native, reference
from halfulp.kernels import params as _params
from halfulp.kernels.reference import TILE
from halfulp.numbers.containers import container
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.numbers.streams import MAX_ELEMENTS, Stream

Array = npt.NDArray[Any]
SPAN = 85 * TILE  # how much of a whole-tensor segment is one unit of work
GRAIN_ELEMENTS = 128 * TILE
Key = tuple[int, int, int]
"""The two words of a stream's key, and the element with which it begins."""


@dataclass(frozen=True, kw_only=True)
class Keyed(Stream):
    """A stream of which only the key is known."""

    words_of_key: tuple[int, int]

    @property
    def key(self) -> tuple[int, int]:
        """The 64-bit Threefry key, as two words."""
        return self.words_of_key


def keyed(key: Sequence[int], offset: int, bits: int = 32) -> Stream:
    """Make a stream of a key."""
    return Keyed(seed=0, name="", offset=offset, bits=bits, words_of_key=(int(key[0]), int(key[1])))


# ---- tensors as flat arrays ---------------------------------------------------------------------


def checked(x: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor without its graph, after checking that kernels can take it."""
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"{what} must be a tensor, not {type(x).__name__}.")
    container(x.dtype)
    with_values(x, what)
    return x.detach() if x.requires_grad else x


def with_values(x: torch.Tensor, what: str) -> None:
    """Refuse a tensor that has no dense values."""
    if x.device.type == "meta":
        raise UsageError(f"{what} is on the meta device: it has no values to work on.")
    if x.is_nested:
        raise UsageError(f"{what} is a nested tensor: expected one with a shape. Use its parts, x.unbind().")
    if x.layout != torch.strided:
        raise UsageError(f"{what} is {x.layout}: expected a dense tensor. Use x.to_dense().")


def writable(out: torch.Tensor, like: torch.Tensor, what: str = "out") -> None:
    """Refuse a destination that cannot hold the result."""
    with_values(out, what)
    if out.dtype != like.dtype:
        raise UsageError(f"{what} must have the dtype of the values, {like.dtype}, not {out.dtype}.")
    if not out.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)
    ):
        raise UsageError(f"{what} is expanded: several of its elements share one place in memory.")


def proposals(d: torch.Tensor, w: torch.Tensor, what: str) -> None:
    """Refuse proposals that the container's arithmetic cannot take: of w's dtype, or float32 for 16 bits."""
    narrow = w.dtype in (torch.bfloat16, torch.float16)
    if d.dtype != w.dtype and not (narrow and d.dtype == torch.float32):
        raise UsageError(f"{what} must have the dtype of the weights, {w.dtype}, not {d.dtype}.")


def checked_tile(tile: Any) -> int:
    """Return the size of a tile; refuse an invalid one."""
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise UsageError(
            f"a tile is a whole number of coordinates, 1 or more (such as the model's width), not {tile!r}."
        )
    return tile


def same_shape(**tensors: torch.Tensor) -> None:
    """Refuse tensors that differ in shape or device."""
    first, *rest = tensors.items()
    for name, x in rest:
        if not isinstance(x, torch.Tensor):
            raise UsageError(f"{name} must be a tensor, not {type(x).__name__}.")
        if x.shape != first[1].shape or x.device != first[1].device:
            raise UsageError(
                f"{name} and {first[0]} must match: {name} has shape {tuple(x.shape)} on {x.device}, "
                f"{first[0]} has {tuple(first[1].shape)} on {first[1].device}."
            )


def flat_of(x: torch.Tensor) -> Array:
    """Return a tensor's values as one contiguous array, in its own memory where possible.

    bfloat16 values are returned as bit patterns, float16 values as a float32 copy.
    """
    if x.requires_grad:
        x = x.detach()
    x = x.resolve_neg()  # numpy has no views that are negated when they are read
    if not (x.is_cpu and x.is_contiguous()):
        x = x.cpu().contiguous()
    flat: Array
    if x.dtype == torch.bfloat16:
        flat = x.view(torch.int16).numpy().view(np.uint16)
    else:
        flat = x.float().numpy() if x.dtype == torch.float16 else x.numpy()
    return flat.reshape(-1)


def as_floats(x: Array) -> Array:
    """Return a flat array as floats: bfloat16 patterns become float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def deliver(result: Array, out: torch.Tensor) -> torch.Tensor:
    """Copy a flat result to the caller's tensor, unless it is there already."""
    if result.dtype == np.uint16:
        tensor = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(result)
    if tensor.data_ptr() != out.data_ptr():
        tensor = tensor.reshape(out.shape)
        out.copy_(tensor.to(out.dtype) if out.is_neg() else tensor)  # torch's own cast forgets to negate
    return out


def destination(out: torch.Tensor) -> Array:
    """Return a flat array for the results of ``out``, in its own memory where possible."""
    return flat_of(out if writes_directly(out) else torch.empty(out.shape, dtype=out.dtype, device="cpu"))


def writes_directly(out: torch.Tensor) -> bool:
    """Return True if kernels can write into a tensor's own memory."""
    return out.is_cpu and out.is_contiguous() and out.dtype != torch.float16 and not out.is_neg()


def key_of(stream: Stream | None, mode: int, numel: int) -> Key:
    """Return the key of a stream's random words, zeros where nothing is drawn."""
    if mode == reference.NEAREST:
        return 0, 0, 0
    if not isinstance(stream, Stream):
        raise UsageError(
            "stochastic rounding needs a stream: pass halfulp.Stream(seed=..., name=..., step=...), "
            f"not {stream!r}."
        )
    if stream.offset + numel > MAX_ELEMENTS:
        raise UsageError(f"a stream has 2**58 elements; {stream.offset} + {numel} are too many.")
    return *stream.key, stream.offset


# ---- many tensors in one call --------------------------------------------------------------------------


def addresses(tensors: Sequence[torch.Tensor]) -> Array:
    """Return the memory addresses of tensors."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))


Counted = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""The counts of a call for each of its tensors: counts per tile, and sums."""


class Parts(Sequence[tuple[torch.Tensor, torch.Tensor]]):
    """The counts of many tensors in two arrays, sliced on demand.

    For small tensors, slicing takes longer than counting.
    """

    def __init__(self, counts: torch.Tensor, sums: torch.Tensor, ends: Sequence[int]) -> None:
        self.counts, self.sums, self._ends = counts, sums, ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        a, b = self._ends[i], self._ends[i + 1]
        return self.counts[a:b], self.sums[a:b]


# ---- grids as numbers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A resolved grid in the working type of a container."""

    grid: Grid
    work: str
    scaled: bool
    floats: Array
    ints: Array

    @property
    def numbers(self) -> dict[str, Array]:
        """The numbers of the grid, as the C++ kernels take them."""
        return {"floats": self.floats, "ints": self.ints}

    def segments(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the segments of values that share a scale, as the C++ kernels take them."""
        row, length = self.layout(shape)
        return {"row": row, "length": length}

    def layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of elements that share a scale, and the length of a row."""
        if self.grid.scaling is None:
            return max(math.prod(shape), 1), max(math.prod(shape), 1)
        return self.grid.scaling.segment_length(shape)


@lru_cache(maxsize=1024)
def plan_for(grid: Grid | str | torch.dtype, dtype: torch.dtype) -> Plan:
    """Return the constants for rounding values of ``dtype`` to a grid."""
    g = named(grid).within(dtype)
    work = _params.working(container(dtype).name)
    p = _params.params(g, work)
    if p.kind != _params.SCALED:
        return Plan(g, work, False, p.floats, p.ints)
    element = _params.params(replace(g, scaling=None), "float64")
    return Plan(g, work, True, element.floats, element.ints)


def narrowing(dtype: torch.dtype) -> int:
    """Return the native core's number of a 16-bit dtype, 0 for others."""
    return {torch.bfloat16: 1, torch.float16: 2}.get(dtype, 0)


def fixed_scales(plan: Plan, shape: tuple[int, ...], dtype: torch.dtype) -> Array | None:
    """Scales that need no data."""
    s = plan.grid.scaling
    if s is None:
        return np.ones(1)
    if s.moves:
        return None
    return reference.scales_from(np.zeros((s.segments(shape), 4)), plan.grid, dtype)


def scales_of(x: Array, plan: Plan, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """Return the scale of each segment of ``x``."""
    fixed = fixed_scales(plan, shape, dtype)
    if fixed is not None:
        return fixed
    assert plan.grid.scaling is not None
    if native.library() is None:
        return reference.scales(as_floats(x).reshape(shape), plan.grid, dtype)
    stats = gathered(plan, shape, {"stored": native.OF_ARRAY[x.dtype], "w": x, "size": x.size})
    return reference.scales_from(stats, plan.grid, dtype)


def gathered(plan: Plan, shape: tuple[int, ...], step: dict[str, Any], proposed: bool = False) -> Array:
    """Return the statistics of segments that a moving grid's rule reads (``StatsCall``)."""
    scaling = plan.grid.scaling
    assert scaling is not None
    row, length = plan.layout(shape)
    whole = length == math.prod(shape) and scaling.rule != "absmean"
    span = SPAN if whole else length
    spans = math.prod(shape) // row * math.ceil(row / span) if math.prod(shape) else 0
    stats = np.zeros((spans, 4))
    stats[:, 1] = -np.inf
    wanted = {"dqt": 1, "absmean": 2}.get(scaling.rule, 0)  # beside magnitudes: signs, a sum
    call = native.call_of(
        "stats", **{**plan.numbers, **plan.segments(shape), **step}, proposed=proposed, want=wanted,
        span=span, stats=stats,
    )  # fmt: skip
    native.run("stats", spans, call, max(GRAIN_ELEMENTS // span, 1))
    if spans == scaling.segments(shape):
        return stats
    top = stats[:, :2].max(axis=0, initial=-np.inf)
    return np.array([[max(top[0], 0.0), top[1], stats[:, 2].sum(), stats[:, 3].sum()]])


def given_scales(scale: torch.Tensor | None, plan: Plan, shape: tuple[int, ...]) -> Array | None:
    """Return scales that a caller gave, after checking that they fit the grid."""
    if scale is None:
        return None
    if plan.grid.scaling is None:
        raise UsageError(f"grid {plan.grid.name} has no scales of its own; leave scale out.")
    if not isinstance(scale, torch.Tensor):
        raise UsageError(
            f"scale must be a tensor of scales, as halfulp.grid({plan.grid.name!r}).scales(x) returns them, "
            f"not {type(scale).__name__}."
        )
    expected = plan.grid.scaling.segments(shape)
    given = np.asarray(scale.detach().double().cpu().numpy()).reshape(-1)
    if given.size != expected:
        raise UsageError(
            f"grid {plan.grid.name} has {expected} scale(s) for shape {shape}, but {given.size} were given."
        )
    return given


def on_gpu(x: torch.Tensor) -> bool:
    """Return True for a tensor on a CUDA device."""
    return x.device.type == "cuda"
