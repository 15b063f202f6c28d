"""Rounding for the compiled trainers of small networks, and how their functions are compiled.

Grids are those that keep the exponents of the container (``m7`` in float64): a bit pattern is rounded at a
cut. :func:`patterns` makes integers of one. The trainers take a step of some hundred weights at a time, for
which a call out of compiled code would cost more than the rounding, so it is compiled into them; tests hold
it to the grid's own rounding, bit for bit. numba, which compiles them, comes with the extra ``paper``.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError
from halfulp.numbers.containers import CONTAINERS
from halfulp.numbers.grids import grid

try:
    from llvmlite import ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic
except ImportError as error:
    raise UsageError(
        "The paper's small networks are trained by code that numba compiles, and numba is not installed: "
        "pip install 'halfulp[paper]'."
    ) from error

__all__ = ["bits_of", "cgutils", "float_like", "intrinsic", "ir", "kernel", "nearest", "patterns",
           "round_pattern", "stochastic", "types"]  # fmt: skip

CUT, TOP, EXPONENT, EMIN = range(4)
"""Columns of a grid: bits that are cut off, the pattern of its largest value; of the container the mask of
exponents and the pattern of its smallest normal number."""


FILES = sorted(Path(__file__).parent.glob("*_kernels.py"))
SOURCE = sha256(b"\0".join(file.read_bytes() for file in FILES)).hexdigest()[:16]


def kernel(function: Any) -> Any:
    """Compile a function; keep the code where a folder for it can be written.

    numba's cache forgets when the file of a function changes, but not when that of a function it calls does:
    so the digest of all files of kernels is part of the name.
    """
    function.__qualname__ += f"_{SOURCE}"
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder for its cache
        return njit(**options)(function)


def patterns(name: str, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
    """Return the columns of a grid.

    Raises:
        UsageError: If its exponents are not those of the container, or it cuts nothing off.
    """
    box, chosen = CONTAINERS[np.dtype(dtype).name], grid(name).within(np.dtype(dtype))
    emin, largest = chosen._fixed()
    cut = box.mantissa - chosen.mantissa
    if chosen.scaling is not None or emin != box.emin or cut < 1 or chosen.lowest is not None:
        raise UsageError(
            f"small networks are trained on grids with the exponents of {np.dtype(dtype)} and fewer bits, "
            f"such as m7: found {name}."
        )
    whole = np.int32 if box.mantissa == 23 else np.int64
    top = int(np.array(min(largest, box.largest), dtype=dtype).view(whole))
    return np.array([cut, top, (2 * box.emax + 1) << box.mantissa, 1 << box.mantissa])


@intrinsic
def bits_of(_context: Any, x: Any) -> Any:
    """Return the bit pattern of a float, as an integer of its width."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(x.bitwidth))

    return (types.int32 if x.bitwidth == 32 else types.int64)(x), build


@intrinsic
def float_like(_context: Any, x: Any, i: Any) -> Any:
    """Return the float of x's type with the low bits of i as its pattern."""

    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value, wide = args[1], ir.IntType(x.bitwidth)
        value = builder.trunc(value, wide) if value.type.width > x.bitwidth else value
        return builder.bitcast(value, context.get_value_type(x))

    return x(x, i), build


@kernel
def round_pattern(u: Any, cut: Any) -> Any:
    """Round a bit pattern to nearest even at bit ``cut``; a sign bit stays as it is."""
    return (u + ((np.int64(1) << (cut - 1)) - 1) + ((u >> cut) & 1)) & ~((np.int64(1) << cut) - 1)


@kernel
def nearest(x: Any, out: Any, k: Any) -> None:
    """Round to nearest even; signs stay, and what is not finite."""
    cut, top = k[CUT], k[TOP]
    for i in range(x.size):
        v = x[i]
        r = float_like(v, min(round_pattern(np.int64(bits_of(abs(v))), cut), top))
        out[i] = np.copysign(r, v) if abs(v) < np.inf else v


@kernel
def random_word(key: Any, element: Any, level: Any) -> Any:
    """Return a word of an element's stream: Threefry-2x32 of 20 rounds, as `halfulp.numbers.streams` says."""
    block = ((element >> 5) << 4) + (element & 15)
    low = np.int64(0xFFFFFFFF)
    keys = (np.int64(key[0]), np.int64(key[1]), np.int64(key[0]) ^ np.int64(key[1]) ^ 0x1BD11BDA)
    x0, x1 = (block + keys[0]) & low, (((block >> 32) | (level << 26)) + keys[1]) & low
    for group in range(5):
        for turn in (13, 15, 26, 6) if group % 2 == 0 else (17, 29, 16, 24):
            x0 = (x0 + x1) & low
            x1 = (((x1 << turn) | (x1 >> (32 - turn))) & low) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & low
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) & low
    return x1 if element & 16 else x0


@kernel
def stochastic(x: Any, out: Any, k: Any, key: Any) -> None:
    """Round up where U < the cut part, to the last digit of U; signs stay, and what is not finite."""
    cut = k[CUT]
    unit = np.int64(1) << cut
    for i in range(x.size):
        v = x[i]
        a = min(np.int64(bits_of(abs(v))), k[TOP])
        rest, level = np.float64(a & (unit - 1)) / np.float64(unit), 0
        a = a & ~(unit - 1)
        while rest > 0.0:
            digit, drawn = np.floor(rest * 4294967296.0), np.float64(random_word(key, i, level))
            if drawn != digit:
                a += unit if drawn < digit else 0
                break
            rest, level = rest * 4294967296.0 - digit, level + 1
        out[i] = np.copysign(float_like(v, a), v) if abs(v) < np.inf else v
