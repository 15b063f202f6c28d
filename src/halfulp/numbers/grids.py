"""Define the grids that weights can be stored on, with their codes and rules.

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
looking like a move. (Two exceptions: ``absmean``, since the mean magnitude of
rounded values is another one; and stochastic rounding, which may draw a smaller code for the largest value of
a segment.)

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.numbers import grid_names
from halfulp.numbers.containers import Container, container
from halfulp.numbers.elements import index_of, value_of
from halfulp.numbers.operations import OPERATIONS
from halfulp.numbers.scaling import Per, Rule, Scaling

if TYPE_CHECKING:
    from halfulp.numbers.streams import Stream

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values a stored weight may take. Make one with :func:`grid`.

    Attributes:
        name: The name that the grid was asked for by.
        mantissa: The number of mantissa bits.
        emin: The smallest normal exponent; None for that of the container (``m7`` and its kin).
        largest: The largest element; None for the largest that the container can hold.
        lowest: The smallest element if it is one more than minus the largest; None for minus the largest.
        scaling: The rule that computes scales, if there are any.
        integer: True if elements are integers.
        note: A scale that is folded into the limits, in words.

    >>> g = grid("e4m3@128")
    >>> g.largest, g.smallest_normal, g.bits
    (3.5, 0.0001220703125, 8)
    >>> g.round(torch.tensor([1.0, 0.3, 100.0]))
    tensor([1.0000, 0.3125, 3.5000])
    """

    name: str
    mantissa: int
    emin: int | None
    largest: float | None
    lowest: float | None = None
    scaling: Scaling | None = None
    integer: bool = False
    note: str = ""

    # ---- resolving against a container -------------------------------------------------

    def within(self, dtype: torch.dtype | npt.DTypeLike) -> Grid:
        """Return this grid with every limit made explicit for a container dtype.

        Args:
            dtype: The container.

        Raises:
            UsageError: If the grid does not fit the container.

        >>> grid("m7").within(torch.float32).largest == grid("bf16").largest
        True
        """
        box = container(dtype)
        if self.emin is None:
            if self.mantissa > box.mantissa:
                raise self._unfit(box, f"it has {self.mantissa} mantissa bits, {box.name} {box.mantissa}")
            top = math.ldexp(2.0 - 2.0**-self.mantissa, box.emax)
            return replace(self, emin=box.emin, largest=top)
        assert self.largest is not None
        if self.scaling is not None:
            spare, largest = box.mantissa + 1 - self._needed_bits, max(self.largest, -self.lo)
            if self.integer and spare < 8:
                raise self._unfit(
                    box, f"code times scale must be exact, which leaves {spare} bits for scales"
                )
            if self.mantissa > box.mantissa:
                raise self._unfit(box, f"it has {self.mantissa} mantissa bits, {box.name} {box.mantissa}")
            if self.scaling.scale * largest > box.largest:
                reach = f"{largest:g} times {self.scaling.scale:g}"
                raise self._unfit(
                    box, f"its largest magnitude is {reach}, that of {box.name} {box.largest:g}"
                )
            return self
        quantum, finest = self.emin - self.mantissa, box.emin - box.mantissa
        if self.largest > box.largest or quantum < finest or self._needed_bits > box.mantissa + 1:
            raise self._unfit(
                box,
                f"it needs {self._needed_bits} significant bits, magnitudes to {self.largest:g} and down to "
                f"2**{quantum}; {box.name} has {box.mantissa + 1}, {box.largest:g} and 2**{finest}",
            )
        return self

    def _unfit(self, box: Container, why: str) -> UsageError:
        cure = f"Keep these weights in float32 (model.float()), or choose a grid that {box.name} can hold."
        return UsageError(f"grid {self.name} does not fit {box.name}: {why}. {cure}")

    @property
    def _needed_bits(self) -> int:
        return self.mantissa + (0 if self.integer else 1)

    def _fixed(self) -> tuple[int, float]:
        """Return emin and largest, for a grid that has them without a container."""
        if self.emin is None or self.largest is None:
            raise UsageError(
                f"the limits of grid {self.name} are those of its container: "
                f"call grid('{self.name}').within(torch.float32) first."
            )
        return self.emin, self.largest

    def same_values(self, other: Grid) -> bool:
        """Return True if two grids hold the same values, whatever their names.

        >>> grid("bf16").same_values(grid("bfloat16")), grid("bf16") == grid("bfloat16")
        (True, False)
        """
        return replace(self, name="", note="") == replace(other, name="", note="")

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
        """Bits per code, including the sign and excluding scales."""
        if self.emin is None:
            return 1 + 8 + self.mantissa  # as stored with an eight-bit exponent
        return 1 + self.last_index.bit_length()

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that a tensor of this shape takes as packed codes with their scales.

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
        """Bytes per weight, in the limit of a large tensor."""
        scales = 0.0
        if self.scaling is not None and self.scaling.moves and self.scaling.per == "group":
            scales = self.scaling.bytes_per_scale / self.scaling.size
        return self.bits / 8 + scales

    @property
    def rules(self) -> dict[str, str]:
        """The behaviour at the edges of the grid, in words, by topic."""
        limit = "the container's largest" if self.largest is None else f"{self.largest:g}"
        span = limit if self.lowest is None else f"{self.lowest:g}..{limit}"
        if self.emin is None:
            small = "gradual, at the container's smallest exponent"
        elif self.integer:
            small = "evenly spaced"
        else:
            small = f"gradual below 2**{self.emin}, spacing 2**{self.emin - self.mantissa}"
        scales = self.note or "1"
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
        """Return every element in increasing order, with zero once, as float64.

        Raises:
            UsageError: If the grid has too many codes to list.

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
        """Return the codes of the nearest grid values, as uint8 (int32 above eight bits).

        Codes of floats are sign and index, the bit pattern that hardware uses; codes of integers are two's
        complement.

        Args:
            x: The values.
            scale: Scales of a grid whose scale moves with the data; by default those of ``x``.

        >>> grid("e4m3").encode(torch.tensor([1.0, -448.0]))
        tensor([ 56, 254], dtype=torch.uint8)
        """
        return OPERATIONS.encode(x, self, scale=scale)

    def decode(
        self, codes: torch.Tensor, *, scale: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the values of codes.

        Args:
            codes: Codes as :meth:`encode` returns them.
            scale: Scales of a grid whose scale moves with the data.
            dtype: The container of the values.

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
        """Round to the nearest grid value, or stochastically to a neighbour.

        Args:
            x: The values.
            stochastic: The random stream of stochastic rounding; None rounds to nearest.
            scale: Fixed scales for a grid whose scale moves with the data (see :meth:`scales`).
            out: A tensor for the result.

        Returns:
            The rounded values, with the shape, dtype and device of ``x``.
        """
        return OPERATIONS.round(x, self, stochastic=stochastic, scale=scale, out=out)

    def scales(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scales that this grid's rule takes from a tensor, as float64, one per segment."""
        return OPERATIONS.scales(x, self)

    def neighbours(
        self, x: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nearest grid values strictly below and strictly above; infinite where there is none.

        Args:
            x: The values.
            scale: Scales of a grid whose scale moves with the data; by default those of ``x``.

        >>> grid("e4m3").neighbours(torch.tensor([1.0, 448.0]))
        (tensor([  0.9375, 416.0000]), tensor([1.1250,    inf]))
        """
        return OPERATIONS.neighbours(x, self, scale=scale)

    def gap(
        self, q: torch.Tensor, direction: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the distance to the adjacent grid value in the direction of a proposal (up for zero).

        Args:
            q: Stored values.
            direction: Proposals; only their signs matter.
            scale: Scales of a grid whose scale moves with the data; by default those of ``q``.

        >>> grid("e4m3").gap(torch.tensor([1.0, 1.0]), torch.tensor([0.1, -0.1]))
        tensor([0.1250, 0.0625])
        """
        return OPERATIONS.gap(q, direction, self, scale=scale)

    @property
    def epsilon(self) -> float:
        """Half the relative spacing at a power of two, 2**-(m+1)."""
        return math.ldexp(1.0, -(self.mantissa + 1))


def float_grid(*, mantissa: int, emin: int, largest: float, factor: float = 1.0, name: str = "") -> Grid:
    """Make a binary float grid of any width, range and power-of-two factor.

    Args:
        mantissa: The number of mantissa bits, 1 to 52.
        emin: The smallest normal exponent, before the factor.
        largest: The largest value, before the factor.
        factor: A power of two by which values are multiplied before they are cast.
        name: The name to print; by default it is made from the limits.

    Returns:
        The grid.

    Raises:
        UsageError: If the limits are not those of a float with so many bits.

    >>> float_grid(mantissa=3, emin=-6, largest=448.0, factor=128).largest
    3.5
    """
    if not 1 <= mantissa <= 52:
        raise UsageError(f"mantissa must be 1 to 52 bits, not {mantissa} (m0 is there without a range).")
    shift = _log2(factor, f"the factor of {name or 'a float grid'}")
    if not (math.isfinite(largest) and largest >= math.ldexp(1.0, emin - mantissa)):
        raise UsageError(f"largest must be finite and at least one quantum, not {largest!r}.")
    candidate = Grid(
        name=name or f"float(m={mantissa},emin={emin - shift},largest={math.ldexp(largest, -shift):g})",
        mantissa=mantissa,
        emin=emin - shift,
        largest=math.ldexp(largest, -shift),
        note=f"{factor:g}: the value times {factor:g} is cast" if shift else "",
    )
    if float(value_of(np.array([candidate.last_index]), candidate)[0]) != candidate.largest:
        raise UsageError(
            f"largest={largest!r} is not a value of a float with {mantissa} mantissa bits and "
            f"smallest exponent {emin}."
        )
    return candidate


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
    """Make a grid of signed integers times a scale.

    Args:
        bits: The number of bits per code, 2 to 8.
        rule: How the scale is computed from the values (``absmax``, ``absmean``, ``dqt``), or ``given``.
        per: Which values share a scale: those of a ``tensor``, a ``row`` or a ``group``.
        size: The number of values per group.
        scale: The scale, with ``rule="given"``.
        symmetric: False adds the code -2**(bits-1); the default is False for ``dqt`` and True otherwise.
        name: The name to print; by default it is made from the arguments.

    Returns:
        The grid.

    Raises:
        UsageError: If the arguments do not fit together.

    >>> integer_grid(4, per="group", size=128).round(torch.tensor([0.7, 0.06]))
    tensor([0.7000, 0.1000])
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
            note=f"{scale:g}: what a code is worth" if shift else "",
        )
    return Grid(
        name=label, mantissa=bits - 1, emin=emin, largest=largest, lowest=low, scaling=scaling, integer=True
    )


def grid(spec: str | torch.dtype | Grid) -> Grid:
    """Return a grid by name or torch dtype.

    ``bf16`` ``fp16`` ``e5m2`` ``e4m3`` ``e3m4`` ``e2m1`` ..., with ``@S`` for a power-of-two
    factor (``e4m3@128``: the value times 128 is cast); ``mK`` for K mantissa bits and the
    container's exponents; ``intB`` with ``/absmax`` (default) ``/absmean`` ``/dqt`` or ``@S``,
    ``/row`` or ``/gN`` (a scale per group of N), ``/asym``; ``mxfp8_e4m3`` and the other block
    formats; and what others call these (:mod:`halfulp.numbers.spellings`).

    Args:
        spec: A name, a torch dtype, or a grid, which is returned as it is.

    Returns:
        The grid.

    Raises:
        UsageError: If no grid has this name.

    >>> print(grid(torch.bfloat16))
    bfloat16: 16 bits, 7 mantissa, normal from 2**-126, largest 3.38953e+38
    """
    if isinstance(spec, Grid):
        return spec
    if not isinstance(spec, str | torch.dtype):
        raise UsageError(f"a grid is a name or a torch dtype, such as 'bf16', not {type(spec).__name__}.")
    name = str(spec).removeprefix("torch.")
    kind, arguments = grid_names.parse(name)
    makers: dict[str, Callable[..., Grid]] = {"float": float_grid, "integer": integer_grid, "other": Grid}
    return makers[kind](**arguments, name=name)


def _log2(factor: float, what: str) -> int:
    fraction, exponent = math.frexp(factor)
    if fraction != 0.5:  # nor is it of what is not positive, or not finite
        near = f", such as {2.0 ** round(math.log2(factor)):g}" if 0 < factor < math.inf else ""
        raise UsageError(f"{what} must be a power of two{near}, not {factor!r}.")
    return exponent - 1
