"""How a proposed value becomes the next stored one.

A policy sees one tensor at a time: ``q`` what is stored, ``z`` what the optimizer made of it, and
a dictionary of tensors that it may keep. ``before`` may change what the optimizer is given,
``after`` has the stored values written over ``z`` and returns where the kernel counts. Rounding,
counting and carrying happen in one kernel call, so a policy is a few lines.

========== ===================================================================== =================
policy     the next stored value                                                 bytes a weight
========== ===================================================================== =================
rne        Q(z), nearest even: loses every proposal below half a gap             0
sr         a neighbour of z, at random, right on average                         0
deadzone-sr Q(z), but stochastic where that would throw a non-zero proposal away  0
eco        Q(z); the error goes into the optimizer's first moment                0
kahan      Q(z + c); the error c is kept                                         4 (2 in bfloat16)
master     Q(master); the optimizer moves an fp32 master                         4
remainder16 as master, whose bits beyond the bfloat16 weight are kept apart       2
remainder8 the same with 8 of those 16 bits, the last of them drawn               1
TileMaster as master, for chosen tiles only; nearest elsewhere                   4 x chosen share
dqt        stochastic on integers whose scale is the old maximum                  0
========== ===================================================================== =================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.grids import grid as named
from halfulp.kernels import TILE, Written
from halfulp.kernels.onepass_reference import LARGEST
from halfulp.streams import Stream
from halfulp.writeback.moments import check_moments, feed_back
from halfulp.writeback.tiles import put_tiles, take_tiles

State = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Step:
    """One tensor at one step, as a policy sees it."""

    name: str
    grid: Grid
    stream: Stream
    q: torch.Tensor
    z: torch.Tensor
    state: State
    moved: torch.Tensor | None
    sums: int
    decay: float
    """Rate times decoupled weight decay."""
    group: dict[str, Any]
    """The optimizer's parameter group."""
    moments: dict[str, Any]
    """The optimizer's own state of this parameter."""
    keep_scales: bool
    scales: torch.Tensor | None = None
    """With ``keep_scales``, what a moving grid was rounded with: packed codes need it."""
    queue: kernels.Queue = field(default_factory=list)
    """The kernel calls that are still to be made."""

    def write(self, mode: kernels.Mode = "nearest", **options: Any) -> Written:
        """The fused kernel, over z: called when all policies have been, or by :meth:`finish`."""
        if self.keep_scales and self.grid.scaling is not None:
            self.scales = kernels.scales(self._scale_source(**options), self.grid)
        return kernels.write_back(
            self.q,
            self.z,
            self.grid,
            mode,
            self.stream,
            moved=self.moved,
            sums=self.sums,
            scale=self.scales,
            queue=self.queue,
            **options,
        )

    def finish(self) -> None:
        """Make the kernel calls that are due."""
        while self.queue:  # an interrupted call is made again: it leaves on the grid what is on it
            self.queue[0]()
            del self.queue[0]

    def _scale_source(self, carry: torch.Tensor | None = None, carry_in: bool = True) -> torch.Tensor:
        """The values from which the kernel takes the scales."""
        if self.grid.scaling is not None and self.grid.scaling.from_old:
            return self.q
        if carry is None or not carry_in:
            return self.z
        return torch.where(torch.isfinite(self.z + carry), self.z + carry, self.z)


@dataclass(frozen=True)
class Policy:
    """Nearest write-back, and what the others change of it."""

    name: ClassVar[str] = "rne"
    stochastic: ClassVar[bool] = False
    """Whether a stream is used, so that the tensor's name matters."""
    precise: ClassVar[bool] = True
    """Whether it saves what only float32 (or wider) arithmetic leaves to save."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value, allowed = getattr(self, option.name), _allowed(option.default)
            if allowed and not any(type(value) is type(a) and value == a for a in allowed.values()):
                raise UsageError(
                    f"{type(self).__name__}({option.name}=...) takes {' or '.join(allowed)}, not {value!r}."
                )

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Refuse what cannot work, before anything is changed."""

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        """The tensors that this policy keeps for one parameter."""
        return {}

    def heed(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        """Somebody may have set weights: where what is kept does not belong to q, begin again from q."""

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        """Change what the optimizer is given; ``p`` equals ``q`` on entry."""

    def after(self, step: Step) -> Written:
        """Write the next stored values over ``step.z``."""
        return step.write()

    @property
    def spec(self) -> str:
        """Name and options, for state and reports."""
        return self.name


class Nearest(Policy):
    """``rne``: round to nearest even."""

    precise: ClassVar[bool] = False


class Stochastic(Policy):
    """``sr``: stochastic rounding, with a stream keyed by seed, name, step and global element."""

    name: ClassVar[str] = "sr"
    stochastic: ClassVar[bool] = True

    def after(self, step: Step) -> Written:
        return step.write("stochastic")


class DeadzoneStochastic(Policy):
    """``deadzone-sr``: draws from the same stream as ``sr``, so that the two are coupled."""

    name: ClassVar[str] = "deadzone-sr"
    stochastic: ClassVar[bool] = True

    def after(self, step: Step) -> Written:
        return step.write("deadzone")


@dataclass(frozen=True)
class ECO(Policy):
    """``eco``: nearest (or stochastic) write-back, the error fed into the first moment.

    The published rule (arXiv 2601.22101, algorithm 3). ``decay_exact`` multiplies what is fed
    back by 1 - lr * weight_decay, which makes decoupled decay exact.
    """

    name: ClassVar[str] = "eco"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    decay_exact: bool = False

    @property
    def stochastic(self) -> bool:  # type: ignore[override]  # an option here
        return self.rounding == "stochastic"

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        check_moments(optimizer, group)
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        if self.decay_exact and not decoupled:
            raise UsageError(
                "eco's decay_exact is for decoupled weight decay, which "
                f"{type(optimizer).__name__} has not: use AdamW."
            )

    def after(self, step: Step) -> Written:
        error = torch.empty_like(step.z, memory_format=torch.contiguous_format).zero_()
        written = step.write(self.rounding, carry=error, carry_in=False)
        step.finish()
        feed_back(error, step.group, step.moments, decay_exact=self.decay_exact)
        return written

    @property
    def spec(self) -> str:
        return f"eco(rounding={self.rounding},decay_exact={self.decay_exact})"


@dataclass(frozen=True)
class Kahan(Policy):
    """``kahan``: what was not written is kept and added to the next proposal. Weight decay is part
    of the proposal, so it is inside the compensated sum."""

    name: ClassVar[str] = "kahan"
    dtype: torch.dtype = torch.float32

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        return {"carry": torch.zeros_like(projected, dtype=self.dtype, memory_format=torch.contiguous_format)}

    def heed(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        state["carry"].masked_fill_(too_large(state["carry"], q, grid), 0.0)

    def after(self, step: Step) -> Written:
        return step.write(carry=step.state["carry"])

    @property
    def spec(self) -> str:
        return f"kahan(dtype={str(self.dtype).removeprefix('torch.')})"


@dataclass(frozen=True)
class Master(Policy):
    """``master``: master weights, an fp32 copy that the optimizer moves; what is stored is its nearest code.

    ``start_from="code"`` starts the copy from the projected code, so that all policies share one
    start; ``"raw"`` from the value before projection (the historical protocol).
    """

    name: ClassVar[str] = "master"
    start_from: Literal["code", "raw"] = "code"

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        source = projected if self.start_from == "code" else raw
        return {"master": source.detach().clone(memory_format=torch.contiguous_format)}

    def heed(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        state["master"].copy_(_mended(state["master"], q, grid))

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        p.copy_(state["master"])

    def after(self, step: Step) -> Written:
        master = step.state["master"]
        if bool(torch.isfinite(step.z.sum())):  # then every term is
            master.copy_(step.z)
        else:
            master.copy_(torch.where(torch.isfinite(step.z), step.z, master))
        return step.write()

    @property
    def spec(self) -> str:
        return f"master(start_from={self.start_from})"


@dataclass(frozen=True)
class Remainder(Policy):
    """``remainder16``, ``remainder8``: what a bfloat16 weight lacks to its fp32 master, beside it.

    The pattern of the master is that of the weight plus the remainder. With 16 bits nothing is lost, so that
    the master is that of ``master``, bit for bit, as long as the gradients are. The weight is the nearest
    bfloat16, *ties away from zero*: under ties to even a weight of even pattern has 65,537 masters, one too
    many for 16
    bits. So it differs from that of ``master`` where a master is exactly between two weights and the lower
    one is even, and nowhere else (but a master beyond bfloat16's range is cut to it).

    With 8 bits the master is rounded stochastically to 16 significant bits: right on average, and off by less
    than 2**-15 of its magnitude in one step (normal numbers).
    """

    bits: ClassVar[int] = 16

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if grid.within(torch.float32) != named("bf16").within(torch.float32):
            raise UsageError(
                f"policy {self.name!r} is for grid bf16, not {grid.name}: use 'master' or 'kahan'."
            )

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        dtype = torch.int16 if self.bits == 16 else torch.int8
        return {"remainder": torch.zeros(projected.shape, dtype=dtype, device=projected.device)}

    def heed(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        weight = q.view(torch.int32)
        master = weight + (state["remainder"].int() << (16 - self.bits))
        nearest = ((master & 0x7FFFFFFF) + 0x8000) & 0x7FFF0000 | master & -(2**31)  # ties away from zero
        state["remainder"].masked_fill_(nearest != weight, 0)

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        p.view(torch.int32).add_(state["remainder"].int() << (16 - self.bits))

    def after(self, step: Step) -> Written:
        master = step.z
        if self.bits == 8:
            master = kernels.round(master, named("m15"), step.stream)
        u = master.view(torch.int32)
        largest = LARGEST & (0x7FFFFFFF << (16 - self.bits))
        u = torch.where(torch.isfinite(master), (u & 0x7FFFFFFF).clamp(max=largest) | (u & -(2**31)), u)
        # The nearest even of a tie that is nudged is the one away from zero.
        step.z.view(torch.int32).copy_(torch.where((u & 0xFFFF) == 0x8000, u | 1, u))
        fine = torch.isfinite(step.z)
        written = step.write()
        step.finish()
        rest = (u - step.z.view(torch.int32)) >> (16 - self.bits)
        kept = step.state["remainder"]
        kept.copy_(torch.where(fine, rest.to(kept.dtype), kept))
        return written


class Remainder16(Remainder):
    name: ClassVar[str] = "remainder16"


class Remainder8(Remainder):
    name: ClassVar[str] = "remainder8"
    bits: ClassVar[int] = 8
    stochastic: ClassVar[bool] = True


@dataclass(frozen=True)
class TileMaster(Policy):
    """fp32 masters for chosen tiles, packed; nearest write-back elsewhere.

    ``mask`` is what :func:`halfulp.allocate` made, or maps tensor names to boolean tensors, one entry a tile.
    ``tile``: consecutive coordinates of a tile, as in the mask, which says it itself; the model's width makes
    a tile one row of an embedding.
    """

    name: ClassVar[str] = "tile-master"
    mask: dict[str, torch.Tensor] = field(default_factory=dict)
    start_from: Literal["code", "raw"] = "code"
    tile: int = TILE
    shard: tuple[int, int] | None = None
    """Where a shard begins in its tensor, and how many coordinates that has; a write-back says it."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # equal to itself alone: masks are tensors

    def __post_init__(self) -> None:
        super().__post_init__()
        mask: Any = self.mask
        if hasattr(mask, "tiles") and hasattr(mask, "tile"):  # one of halfulp.masks
            if self.tile not in (TILE, mask.tile):
                raise UsageError(
                    f"the mask has tiles of {mask.tile} coordinates, not of {self.tile} (tile=)."
                )
            object.__setattr__(self, "mask", mask.tiles)
            object.__setattr__(self, "tile", mask.tile)
        elif not isinstance(mask, Mapping):
            raise UsageError(
                "TileMaster takes a mask (halfulp.allocate, Mask.load), or a dictionary of booleans a tile "
                f"by tensor name, not {type(mask).__name__}."
            )
        kernels.checked_tile(self.tile)

    @property
    def offset(self) -> int | None:
        return None if self.shard is None else self.shard[0]

    def chosen(self, name: str, numel: int) -> torch.Tensor:
        """The chosen tiles of a tensor, as sorted indices."""
        if name not in self.mask:
            raise UsageError(
                f"the mask has no entry for {name!r}: it was made for another model. It knows "
                f"{', '.join(list(self.mask)[:5]) or 'nothing'}{' ...' if len(self.mask) > 5 else ''}."
            )
        mask, expected = self.mask[name], kernels.tiles_of(numel, self.tile)
        if mask.dtype != torch.bool or mask.numel() != expected:
            raise UsageError(
                f"the mask of {name!r} must be {expected} booleans (tiles of {self.tile} for {numel} "
                f"coordinates), but it is {mask.numel()} of {mask.dtype}: it was made for another model, "
                "or for tiles of another size (tile=)."
            )
        return mask.reshape(-1).nonzero().reshape(-1)

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        source = (projected if self.start_from == "code" else raw).detach()
        numel = source.numel() if self.shard is None else self.shard[1]
        tiles = self.chosen(name, numel)
        size = int((numel - tiles * self.tile).clamp(max=self.tile).sum())
        tiles = tiles.to(source.device, torch.int32)
        return {"master": take_tiles(source, tiles, size, self.tile, self.offset), "tiles": tiles}

    def heed(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        whole = q.clone(memory_format=torch.contiguous_format)  # a scale may be of more than a tile
        self.before(q, whole, state)
        master, mended = state["master"], _mended(whole, q, grid)
        master.copy_(take_tiles(mended, state["tiles"], master.numel(), self.tile, self.offset))

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        put_tiles(p, state["tiles"], state["master"], self.tile, self.offset)

    def after(self, step: Step) -> Written:
        master = step.state["master"]
        moved = take_tiles(step.z, step.state["tiles"], master.numel(), self.tile, self.offset)
        step.state["master"] = torch.where(torch.isfinite(moved), moved, master)
        return step.write()

    @property
    def spec(self) -> str:
        size = "" if self.tile == TILE else f",tile={self.tile}"
        return f"tile-master(start_from={self.start_from}{size})"


class DQT(Policy):
    """``dqt``: stochastic rounding at the scale that the old weights' signed maximum gives."""

    name: ClassVar[str] = "dqt"
    stochastic: ClassVar[bool] = True

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if grid.scaling is None or grid.scaling.rule != "dqt":
            raise UsageError(f"policy 'dqt' needs a grid with DQT's rule, such as int3/dqt, not {grid.name}.")

    def after(self, step: Step) -> Written:
        return step.write("stochastic")


def too_large(carry: torch.Tensor, q: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Where a carry is not what nearest rounding leaves over: more than half the gap on its side of q."""
    below, above = (side.double() for side in grid.neighbours(q))
    at, c = q.double(), carry.double()
    return (c > (above - at) / 2) | (c < (below - at) / 2)


def _mended(master: torch.Tensor, q: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Masters that round to what is stored, and else that."""
    return torch.where(kernels.round(master, grid) == q, master, q)


POLICIES: dict[str, type[Policy]] = {
    p.name: p
    for p in (Nearest, Stochastic, DeadzoneStochastic, ECO, Kahan, Master, Remainder16, Remainder8, DQT)
}


_CHOICES = (("nearest", "stochastic"), ("code", "raw"))
_SPEC = re.compile(r"([a-z0-9-]+)(?:\(([^()]*)\))?")


def policy(spec: str | Policy) -> Policy:
    """A policy by name, with options as it prints them itself, or as it is.

    >>> policy("master").spec
    'master(start_from=code)'
    >>> policy("master(start_from=raw)")
    Master(start_from='raw')
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise UsageError(f"a policy is a name such as 'kahan', or one such as halfulp.Kahan(), not {spec!r}.")
    kind, options = parsed(spec)
    if kind is TileMaster:
        raise UsageError(f"policy {spec!r} needs to know its tiles: pass halfulp.TileMaster(mask).")
    return kind(**options)


def parsed(spec: str) -> tuple[type[Policy], dict[str, Any]]:
    """The kind of a policy, and the options that its printed form names."""
    found = _SPEC.fullmatch(spec)
    kind = {**POLICIES, TileMaster.name: TileMaster}.get(found[1]) if found is not None else None
    if found is None or kind is None:
        known = ", ".join(POLICIES)
        raise UsageError(f"unknown policy {spec!r}: expected one of {known}, or halfulp.TileMaster(mask).")
    allowed = {f.name: values for f in fields(kind) if (values := _allowed(f.default))}
    options = {}
    for part in filter(None, (found[2] or "").split(",")):
        name, _, text = part.partition("=")
        if text not in allowed.get(name, {}):
            known = "; ".join(f"{n}={' or '.join(values)}" for n, values in allowed.items()) or "none"
            raise UsageError(f"policy {spec!r}: {part!r} is not an option of {found[1]}. Options: {known}.")
        options[name] = allowed[name][text]
    return kind, options


def _allowed(default: Any) -> dict[str, Any]:
    """The values of an option as a policy prints them, from its default: what they stand for."""
    if isinstance(default, torch.dtype):
        return {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16)}
    if isinstance(default, bool):
        return {str(value): value for value in (False, True)}
    return {value: value for values in _CHOICES if default in values for value in values}
