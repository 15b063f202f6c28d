"""What a stored weight may be: grids, their names, their codes and their rules.

A grid is a set of real numbers. Every grid here is an *element* set times a *scale*:

    value = element * scale

The element set is that of a small binary float: with ``m`` mantissa bits and smallest
normal exponent ``emin``, the magnitudes are

    n * 2**(emin - m)                                        for n <= 2**m
    (2**m + n % 2**m) * 2**(emin - m + n // 2**m - 1)        for n >= 2**m

up to a largest one. ``n`` is the *index*: magnitudes in increasing order, so neighbours
are ``n - 1`` and ``n + 1``, "ties to even code" is "ties to even n", and for the formats
that hardware knows, ``n`` is the bit pattern without its sign. Integers are the same set
with every magnitude below the first normal one (``m = emin = bits - 1``, so the spacing
is 1); that is why one rounding routine serves them all.

The scale is 1 or a power of two for float grids (``e4m3@128``: the value times 128 is
cast, so the scale is 1/128 and the largest value 3.5; it is folded into ``emin``), a given
number or one taken from the tensor for integer grids, and one per block for block formats.
A scale taken from data is rounded to so few bits that every ``element * scale`` is exact in
the container; then rounding twice is rounding once, which keeps "no proposal" from ever
looking like a move. (Not under ``absmean``: the mean magnitude of rounded values is another one.)

Rules, the same for every grid:

* nearest means nearest in exact arithmetic, ties to the even index;
* values below the smallest normal are spaced evenly down to zero (gradual underflow);
* finite values beyond the largest code saturate to it;
* -0 equals +0: rounding keeps the sign of its argument, comparisons ignore it;
* NaN and infinities are no codes: rounding hands them back unchanged, kernels count them,
  :meth:`Grid.encode` refuses them.

Why not define a grid by a cast? Because casts disagree: torch saturates float8_e4m3fn
where ml_dtypes gives NaN, and both turn bf16 overflow into infinity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp.elements import index_of, value_of
from halfulp.errors import UsageError

if TYPE_CHECKING:
    from halfulp.streams import Stream

Array = npt.NDArray[Any]


class Operations:
    """What a grid's methods on tensors call. Kernels and events, which know grids, put themselves here."""

    round: Callable[..., torch.Tensor]
    scales: Callable[..., torch.Tensor]
    encode: Callable[..., torch.Tensor]
    decode: Callable[..., torch.Tensor]
    gap: Callable[..., torch.Tensor]
    neighbours: Callable[..., tuple[torch.Tensor, torch.Tensor]]


OPERATIONS = Operations()
Rule = Literal["given", "absmax", "absmean", "dqt", "mx", "nv"]
Per = Literal["tensor", "row", "group"]


@dataclass(frozen=True, kw_only=True)
class Container:
    """The floating-point type that holds grid values in memory."""

    name: str
    mantissa: int
    emin: int
    emax: int

    @property
    def largest(self) -> float:
        return math.ldexp(2.0 - 2.0**-self.mantissa, self.emax)


CONTAINERS = {
    "float64": Container(name="float64", mantissa=52, emin=-1022, emax=1023),
    "float32": Container(name="float32", mantissa=23, emin=-126, emax=127),
    "bfloat16": Container(name="bfloat16", mantissa=7, emin=-126, emax=127),
    "float16": Container(name="float16", mantissa=10, emin=-14, emax=15),
}


def container(dtype: torch.dtype | npt.DTypeLike) -> Container:
    """The container of a torch or NumPy dtype."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    if name not in CONTAINERS:
        raise UsageError(
            f"{name} cannot hold grid values: expected one of {', '.join(CONTAINERS)}. "
            "Cast the tensor to float32 first, or decode it if it holds codes."
        )
    return CONTAINERS[name]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Where the scale of a grid comes from, when it is not folded into the element set.

    ``rule``: ``given`` (``scale``), ``absmax`` (largest magnitude / largest code), ``absmean``
    (mean magnitude / largest code), ``dqt`` (largest *signed* value of the old weights / largest
    code), ``mx`` (a power of two a block, OCP MX), ``nv`` (an e4m3 number a block).
    ``per``: one scale a ``tensor``, a ``row`` (the last dimension), or a ``group`` of ``size``
    consecutive values of a row. ``from_old``: the scale of a write-back comes from the weights
    before it; otherwise from the values being written.
    """

    rule: Rule
    per: Per = "tensor"
    size: int = 0
    scale: float = 0.0

    @property
    def moves(self) -> bool:
        return self.rule != "given"

    @property
    def from_old(self) -> bool:
        return self.rule == "dqt"

    @property
    def bytes_per_scale(self) -> int:
        return 1 if self.rule in ("mx", "nv") else 4

    def segment_length(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(row length, segment length): which consecutive values share a scale."""
        numel = math.prod(shape)
        if self.per == "tensor" or numel == 0:
            return max(numel, 1), max(numel, 1)
        row = shape[-1] if shape else 1
        return row, row if self.per == "row" else min(self.size, row)

    def segments(self, shape: tuple[int, ...]) -> int:
        """How many scales a tensor of this shape has."""
        row, length = self.segment_length(shape)
        return math.prod(shape) // row * math.ceil(row / length)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values a stored weight may take. Make one with :func:`grid`.

    >>> g = grid("e4m3@128")
    >>> g.largest, g.smallest_normal, g.bits
    (3.5, 0.0001220703125, 8)
    >>> g.round(torch.tensor([1.0, 0.3, 100.0]))
    tensor([1.0000, 0.3125, 3.5000])
    """

    name: str
    mantissa: int
    emin: int | None
    """Smallest normal exponent; None: that of the container (``m7`` and its kin)."""
    largest: float | None
    """Largest element; None: the largest that the container can hold."""
    lowest: float | None = None
    """Smallest element, where it is one more than minus the largest; None: minus the largest."""
    scaling: Scaling | None = None
    integer: bool = False
    note: str = ""

    # ---- resolving against a container -------------------------------------------------

    def within(self, dtype: torch.dtype | npt.DTypeLike) -> Grid:
        """This grid with every limit explicit for a container; an error if it does not fit.

        >>> grid("m7").within(torch.float32).largest == grid("bf16").largest
        True
        """
        box = container(dtype)
        if self.emin is None:
            if self.mantissa > box.mantissa:
                raise UsageError(
                    f"grid {self.name} does not fit {box.name}: it has {self.mantissa} mantissa "
                    f"bits, the container {box.mantissa}. Use a wider container."
                )
            top = math.ldexp(2.0 - 2.0**-self.mantissa, box.emax)
            return replace(self, emin=box.emin, largest=top)
        assert self.largest is not None
        if self.scaling is not None:
            if self.integer and box.mantissa + 1 - self._needed_bits < 8:
                raise UsageError(
                    f"grid {self.name} does not fit {box.name}: code times scale must be exact, which leaves "
                    f"{box.mantissa + 1 - self._needed_bits} bits for the scale, too few. Use float32."
                )
            if self.mantissa > box.mantissa:
                raise UsageError(f"grid {self.name} does not fit {box.name}: too few mantissa bits.")
            if self.scaling.scale * max(self.largest, -self.lo) > box.largest:
                raise UsageError(
                    f"grid {self.name} does not fit {box.name}: its largest magnitude is "
                    f"{max(self.largest, -self.lo):g} times {self.scaling.scale:g}, the container's "
                    f"{box.largest:g}. Use a wider container."
                )
            return self
        quantum = self.emin - self.mantissa
        if (
            self.largest > box.largest
            or quantum < box.emin - box.mantissa
            or self._needed_bits > box.mantissa + 1
        ):
            raise UsageError(
                f"grid {self.name} does not fit {box.name}: it needs {self._needed_bits} significant "
                f"bits, magnitudes up to {self.largest:g} and down to 2**{quantum}; the container "
                f"has {box.mantissa + 1}, {box.largest:g} and 2**{box.emin - box.mantissa}. "
                "Use a wider container."
            )
        return self

    @property
    def _needed_bits(self) -> int:
        return self.mantissa + (0 if self.integer else 1)

    def _fixed(self) -> tuple[int, float]:
        """emin and largest, for a grid that has them without a container."""
        if self.emin is None or self.largest is None:
            raise UsageError(
                f"the limits of grid {self.name} are those of its container: "
                f"call grid('{self.name}').within(torch.float32) first."
            )
        return self.emin, self.largest

    # ---- facts -------------------------------------------------------------------------

    @property
    def smallest_normal(self) -> float:
        """2**emin, the first magnitude with a full mantissa (times the scale)."""
        return math.ldexp(1.0, self._fixed()[0])

    @property
    def quantum(self) -> float:
        """The smallest gap, 2**(emin - m) (times the scale)."""
        return math.ldexp(1.0, self._fixed()[0] - self.mantissa)

    @cached_property
    def last_index(self) -> int:
        """The index of the largest magnitude."""
        return int(index_of(np.array([self._fixed()[1]]), self)[0])

    @property
    def lo(self) -> float:
        """The smallest element."""
        return -self._fixed()[1] if self.lowest is None else self.lowest

    @property
    def bits(self) -> int:
        """Bits a code takes, sign included, scales not."""
        if self.emin is None:
            return 1 + 8 + self.mantissa  # as stored with an eight-bit exponent
        return 1 + self.last_index.bit_length()

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that a tensor of this shape takes as packed codes with its scales.

        >>> grid("mxfp4").payload_bytes((768, 768)) * 8 / 768**2
        4.25
        """
        scales = 0
        if self.scaling is not None and self.scaling.moves:
            scales = self.scaling.segments(shape) * self.scaling.bytes_per_scale
            if self.scaling.rule == "nv":
                scales += 4
        return math.ceil(math.prod(shape) * self.bits / 8) + scales

    @property
    def bytes_per_weight(self) -> float:
        """Bytes a weight, in the limit of a large tensor."""
        scales = 0.0
        if self.scaling is not None and self.scaling.moves and self.scaling.per == "group":
            scales = self.scaling.bytes_per_scale / self.scaling.size
        return self.bits / 8 + scales

    @property
    def rules(self) -> dict[str, str]:
        """What happens at the edges, in words."""
        limit = "the container's largest" if self.largest is None else f"{self.largest:g}"
        span = limit if self.lowest is None else f"{self.lowest:g}..{limit}"
        if self.emin is None:
            small = "gradual, at the container's smallest exponent"
        elif self.integer:
            small = "evenly spaced"
        else:
            small = f"gradual below 2**{self.emin}, spacing 2**{self.emin - self.mantissa}"
        scales = "1 (folded into the limits)"
        if self.scaling is not None:
            s = self.scaling
            unit = {"tensor": "tensor", "row": "row", "group": f"{s.size} values"}[s.per]
            scales = f"{s.scale:g}" if not s.moves else f"{s.rule}, one per {unit}, moves with the data"
        return {
            "ties": "to the even code",
            "subnormals": small,
            "overflow": f"finite values saturate at {span}",
            "zero": "-0 equals +0",
            "non-finite": "no code: handed back unchanged by round, counted by kernels, refused by encode",
            "scale": scales,
        }

    def __str__(self) -> str:
        limit = "container's" if self.largest is None else f"{self.largest:g}"
        low = "container's" if self.emin is None else f"2**{self.emin}"
        return f"{self.name}: {self.bits} bits, {self.mantissa} mantissa, normal from {low}, largest {limit}"

    # ---- values ------------------------------------------------------------------------

    def values(self) -> Array:
        """Every element in increasing order, zero once, as float64.

        >>> grid("e2m1").values()[-8:]
        array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ])
        """
        self._fixed()
        if self.bits > 24:
            raise UsageError(f"grid {self.name} has 2**{self.bits} codes, too many to list.")
        up = value_of(np.arange(self.last_index + 1, dtype=np.int64), self)
        low = up[1:][::-1] * -1.0
        if self.lowest is not None:
            low = np.concatenate([[self.lowest], low])
        return np.concatenate([low, up])

    def encode(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Codes of the nearest grid values, uint8 (int32 above eight bits): sign and index for
        floats, which is the bit pattern hardware uses; two's complement for integers.

        >>> grid("e4m3").encode(torch.tensor([1.0, -448.0]))
        tensor([ 56, 254], dtype=torch.uint8)
        """
        return OPERATIONS.encode(x, self, scale=scale)

    def decode(
        self, codes: torch.Tensor, *, scale: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The values of codes, in a container.

        >>> grid("e4m3").decode(torch.tensor([56, 254]))
        tensor([   1., -448.])
        """
        return OPERATIONS.decode(codes, self, scale=scale, dtype=dtype)

    # ---- arithmetic on tensors -----------------------------------------------------------

    def round(
        self,
        x: torch.Tensor,
        stochastic: Stream | None = None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The nearest grid value, or a stochastic neighbour; keeps shape, dtype and device.

        ``scale`` fixes the scales of a grid whose scale moves with the data (see :meth:`scales`).
        """
        return OPERATIONS.round(x, self, stochastic=stochastic, scale=scale, out=out)

    def scales(self, x: torch.Tensor) -> torch.Tensor:
        """The scales that this grid's rule takes from a tensor, float64, one a segment."""
        return OPERATIONS.scales(x, self)

    def neighbours(
        self, x: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The nearest codes strictly below and strictly above; infinite where there is none.

        >>> grid("e4m3").neighbours(torch.tensor([1.0, 448.0]))
        (tensor([  0.9375, 416.0000]), tensor([1.1250,    inf]))
        """
        return OPERATIONS.neighbours(x, self, scale=scale)

    def gap(
        self, q: torch.Tensor, direction: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The distance to the adjacent code in the direction of a proposal (up for zero).

        >>> grid("e4m3").gap(torch.tensor([1.0, 1.0]), torch.tensor([0.1, -0.1]))
        tensor([0.1250, 0.0625])
        """
        return OPERATIONS.gap(q, direction, self, scale=scale)

    @property
    def epsilon(self) -> float:
        """Half the relative spacing at a power of two, 2**-(m+1)."""
        return math.ldexp(1.0, -(self.mantissa + 1))


# ---- names --------------------------------------------------------------------------------

# name: (mantissa, emin, largest)
_FLOATS: dict[str, tuple[int, int, float]] = {
    "float32": (23, -126, CONTAINERS["float32"].largest),
    "tf32": (10, -126, math.ldexp(2.0 - 2.0**-10, 127)),
    "bfloat16": (7, -126, math.ldexp(2.0 - 2.0**-7, 127)),
    "float16": (10, -14, 65504.0),
    "float8_e5m2": (2, -14, 57344.0),
    "float8_e5m2fnuz": (2, -15, 57344.0),
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e4m3": (3, -6, 240.0),
    "float8_e4m3fnuz": (3, -7, 240.0),
    "float8_e4m3b11fnuz": (3, -10, 30.0),
    "float8_e3m4": (4, -2, 15.5),
    "float6_e2m3fn": (3, 0, 7.5),
    "float6_e3m2fn": (2, -2, 28.0),
    "float4_e2m1fn": (1, 0, 6.0),
}

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "e5m2": "float8_e5m2",
    "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "e3m4": "float8_e3m4",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
    "fp4": "float4_e2m1fn",
    "mxfp4_e2m1": "mxfp4",
}

# name: (element, block size, rule)
_BLOCKS: dict[str, tuple[str, int, Rule]] = {
    "mxfp8_e4m3": ("float8_e4m3fn", 32, "mx"),
    "mxfp8_e5m2": ("float8_e5m2", 32, "mx"),
    "mxfp6_e2m3": ("float6_e2m3fn", 32, "mx"),
    "mxfp6_e3m2": ("float6_e3m2fn", 32, "mx"),
    "mxfp4": ("float4_e2m1fn", 32, "mx"),
    "nvfp4": ("float4_e2m1fn", 16, "nv"),
}

SHOWN = (
    "bf16", "fp16", "e5m2", "e4m3", "e4m3@128", "e3m4", "e2m3", "e3m2", "e2m1", "m7",
    "int8", "int4", "int3/dqt", "int4/absmean", "int8/row", "int4/g128",
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4",
)  # fmt: skip
"""One example of every kind of name, for lists and error messages."""

# One spelling a name: ASCII digits (\\d knows others), no zeros in front, and always fullmatch ($ lets a line
# break pass). A factor is written as Python prints a number.
_INTEGER = re.compile(r"int([2-8])")
_WIDE = re.compile(r"m(0|[1-9][0-9]?)")
_GROUP = re.compile(r"g([1-9][0-9]{0,5})")
_FACTOR = re.compile(r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?")


def float_grid(*, mantissa: int, emin: int, largest: float, factor: float = 1.0, name: str = "") -> Grid:
    """A binary float grid of any width, range and power-of-two factor.

    >>> float_grid(mantissa=3, emin=-6, largest=448.0, factor=128).largest
    3.5
    """
    if not 1 <= mantissa <= 52:
        raise UsageError(f"mantissa must be 1 to 52 bits, not {mantissa} (m0 is there without a range).")
    shift = _log2(factor, f"the factor of {name or 'a float grid'}")
    if not (math.isfinite(largest) and largest >= math.ldexp(1.0, emin - mantissa)):
        raise UsageError(f"largest must be finite and at least one quantum, not {largest!r}.")
    made = Grid(
        name=name or f"float(m={mantissa},emin={emin - shift},largest={math.ldexp(largest, -shift):g})",
        mantissa=mantissa,
        emin=emin - shift,
        largest=math.ldexp(largest, -shift),
    )
    if float(value_of(np.array([made.last_index]), made)[0]) != made.largest:
        raise UsageError(
            f"largest={largest!r} is not a value of a float with {mantissa} mantissa bits and "
            f"smallest exponent {emin}."
        )
    return made


def integer_grid(
    bits: int,
    *,
    rule: Rule = "absmax",
    per: Per = "tensor",
    size: int = 0,
    scale: float = 0.0,
    symmetric: bool | None = None,
    name: str = "",
) -> Grid:
    """Signed integers times a scale that is given (``rule="given"``) or taken from the tensor.

    ``symmetric=False`` adds the code -2**(bits-1), as DQT does; it is the default of ``dqt``.
    """
    if not 2 <= bits <= 8:
        raise UsageError(f"integer grids have 2 to 8 bits, not {bits}.")
    if rule in ("mx", "nv"):
        raise UsageError(f"rule {rule!r} belongs to block formats, not to integers.")
    if (per == "group") != (size > 0):
        raise UsageError(f"per='group' takes a size, and only it does (per={per!r}, size={size}).")
    if (rule == "given") != (scale > 0) or not math.isfinite(scale):
        raise UsageError(
            f"rule='given' takes a positive scale, and only it does (rule={rule!r}, scale={scale!r})."
        )
    top = 2 ** (bits - 1) - 1
    if symmetric is None:
        symmetric = rule != "dqt"
    low = None if symmetric else float(-top - 1)
    label = name or f"int{bits}/{rule}/{per}{size or ''}" + ("" if symmetric else "/asym")
    emin, largest, scaling = bits - 1, float(top), Scaling(rule=rule, per=per, size=size, scale=scale)
    fraction, exponent = math.frexp(scale)
    if rule == "given" and fraction == 0.5:  # a power of two folds into the limits
        shift = exponent - 1
        return Grid(
            name=label,
            mantissa=bits - 1,
            emin=emin + shift,
            largest=math.ldexp(largest, shift),
            lowest=None if low is None else math.ldexp(low, shift),
            integer=True,
        )
    return Grid(
        name=label, mantissa=bits - 1, emin=emin, largest=largest, lowest=low, scaling=scaling, integer=True
    )


def grid(spec: str | torch.dtype | Grid) -> Grid:
    """A grid by name or torch dtype.

    ``bf16`` ``fp16`` ``e5m2`` ``e4m3`` ``e3m4`` ``e2m1`` ..., with ``@S`` for a power-of-two
    factor; ``mK`` for K mantissa bits and the container's exponents; ``intB`` with ``/absmax``
    (default) ``/absmean`` ``/dqt`` or ``@S``, ``/row`` or ``/gN``, ``/asym``; ``mxfp8_e4m3``
    and the other block formats.

    >>> print(grid(torch.bfloat16))
    bfloat16: 16 bits, 7 mantissa, normal from 2**-126, largest 3.38953e+38
    """
    if isinstance(spec, Grid):
        return spec
    if isinstance(spec, torch.dtype):
        spec = str(spec).removeprefix("torch.")
    if not isinstance(spec, str):
        raise UsageError(f"a grid is a name or a torch dtype, not {type(spec).__name__}.")
    head, *options = spec.split("/")
    base, _, factor_text = head.partition("@")
    factor = _factor(factor_text, spec) if "@" in head else 1.0
    base = _ALIASES.get(base, base)
    if match := _INTEGER.fullmatch(base):
        return _integer_by_name(int(match[1]), factor if "@" in head else None, options, spec)
    if not options:
        if base in _FLOATS:
            mantissa, emin, largest = _FLOATS[base]
            return float_grid(mantissa=mantissa, emin=emin, largest=largest, factor=factor, name=spec)
        if (match := _WIDE.fullmatch(base)) and int(match[1]) <= 52 and "@" not in head:
            return Grid(name=spec, mantissa=int(match[1]), emin=None, largest=None, note="wide exponent")
        if base in _BLOCKS and "@" not in head:
            element, size, rule = _BLOCKS[base]
            mantissa, emin, largest = _FLOATS[element]
            return Grid(
                name=spec,
                mantissa=mantissa,
                emin=emin,
                largest=largest,
                scaling=Scaling(rule=rule, per="group", size=size),
            )
    raise UsageError(
        f"unknown grid {spec!r}. Known: {', '.join(SHOWN)}; also {', '.join(_FLOATS)}, "
        "m0 to m52, int2 to int8, and @S (a power of two) after a float."
    )


def _integer_by_name(bits: int, factor: float | None, options: list[str], spec: str) -> Grid:
    rule: Rule = "absmax" if factor is None else "given"
    per: Per = "tensor"
    size = 0
    symmetric: bool | None = None
    said: list[str] = []
    for option in options:
        if option in ("absmax", "absmean", "dqt") and factor is None:
            rule = option  # type: ignore[assignment]  # narrowed by the line above
            said.append("rule")
        elif option == "row":
            per = "row"
            said.append("per")
        elif match := _GROUP.fullmatch(option):
            per, size = "group", int(match[1])
            said.append("per")
        elif option in ("asym", "sym"):
            symmetric = option == "sym"
            said.append("symmetric")
        else:
            raise UsageError(
                f"unknown option {option!r} in grid {spec!r}: expected absmax, absmean, dqt "
                "(not with @), row, gN, sym or asym."
            )
    if len(set(said)) < len(said):
        raise UsageError(
            f"grid {spec!r} says the same thing twice: give a rule, row or gN, and sym or asym once."
        )
    return integer_grid(
        bits, rule=rule, per=per, size=size, scale=0.0 if factor is None else 1.0 / factor,
        symmetric=symmetric, name=spec,
    )  # fmt: skip


def _factor(text: str, spec: str) -> float:
    factor = float(text) if _FACTOR.fullmatch(text) else math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"the factor in grid {spec!r} must be a positive number, not {text!r}.")
    return factor


def _log2(factor: float, what: str) -> int:
    fraction, exponent = math.frexp(factor)
    if fraction != 0.5:  # nor is it of what is not positive, or not finite
        raise UsageError(f"{what} must be a power of two, not {factor!r}.")
    return exponent - 1
