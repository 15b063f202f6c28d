"""Moments in eight bits: a code per value, and the largest magnitude of each 64 values as their scale.

With s the largest magnitude of a block, a first moment is s c|c| / 127**2 for a signed code c, finer
near zero. A second moment is s c**4 / 255**4, so that its root, which a step divides by, is a square of
the code, too: it spans four and a half decades, and gradients that differ a thousandfold are kept apart.

A value is rounded stochastically to the largest code that does not exceed it or to the next, with the
probability that makes it right on average. That is what a moment needs: with beta2 = .999 a second moment
moves by a thousandth of itself in a step, and the gaps of codes are 1.6% of it at best, so that nearest
rounding keeps it from moving within its block. The digits of a first moment are those of a short stream
(:mod:`halfulp.numbers.streams`), those of the second moment the same with their two bytes exchanged. A digit
d of 16 bits goes up if d + 1/2 is below 65536 times the probability.

Two rules are about safety. A second moment that is not zero has a code of at least 1: a step divides by its
root, so one that is rounded to zero would make the largest step of all. And a value that is not finite makes
its block's scale NaN.

Everything is float32, every operation rounded by itself. ``native/coded_moments.h`` gives the same bits, in a
step of one pass (:mod:`halfulp.kernels.onepass`) too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from halfulp.kernels import native
from halfulp.kernels.plan import keyed
from halfulp.kernels.reference import tiles_of

Array = npt.NDArray[Any]
BLOCK = 64
"""The number of values that share a scale."""
real = np.float32


class Coded(NamedTuple):
    """A moment as it is stored: int8 codes of a first moment, uint8 ones of a second; scales."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def second(self) -> bool:
        """True for a second moment."""
        return self.codes.dtype == torch.uint8


def decode(coded: Coded, values: torch.Tensor) -> None:
    """Write the values of a moment, float32, into a tensor of as many."""
    if native.library() is None:
        decoded_values = decoded(coded.codes.numpy().reshape(-1), coded.scales.numpy().reshape(-1))
        values.view(-1).copy_(torch.from_numpy(decoded_values))
    else:
        _run(coded, values, 0, (0, 0), 0)


def encode(values: torch.Tensor, coded: Coded, key: tuple[int, int], offset: int) -> None:
    """Write a moment's values as codes, by the draws of a short stream.

    Args:
        values: Contiguous, float32.
        coded: Takes the codes and the scales.
        key: The key of the stream.
        offset: The element of the stream at which the values begin.
    """
    if native.library() is None:
        digits = keyed(key, offset, 16).words(values.numel())
        codes, scales = encoded(values.numpy().reshape(-1), digits, second=coded.second)
        coded.codes.view(-1).copy_(torch.from_numpy(codes))
        coded.scales.view(-1).copy_(torch.from_numpy(scales))
    else:
        _run(coded, values, 1, key, offset)


def _run(coded: Coded, values: torch.Tensor, encodes: int, key: tuple[int, int], offset: int) -> None:
    call = native.call_of(
        "moments", second=int(coded.second), encodes=encodes, codes=coded.codes.data_ptr(),
        scales=coded.scales.data_ptr(), values=values.data_ptr(), size=values.numel(), offset=offset,
    )  # fmt: skip
    call.key[:] = key
    native.run("moments", tiles_of(values.numel()), call)


# ---- the definition ------------------------------------------------------------------------------------


def power(codes: Array, second: bool) -> Array:
    """Return the values of codes in units of their block's smallest."""
    c = codes.astype(real)
    y = c * np.abs(c)
    return y * y if second else y


def decoded(codes: Array, scales: Array) -> Array:
    """Return the values of flat codes."""
    second = codes.dtype == np.uint8
    most = power(np.array(255 if second else 127), second)
    with np.errstate(invalid="ignore"):
        return np.asarray(power(codes, second) / most * np.repeat(scales, BLOCK)[: codes.size])


def encoded(values: Array, digits: Array, *, second: bool) -> tuple[Array, Array]:
    """Return the codes and scales of flat values, by draws of 16 digits."""
    n = values.size
    x = np.pad(values, (0, -n % BLOCK)).reshape(-1, BLOCK)
    top = (x.view(np.int32) & 0x7FFFFFFF).max(axis=1)
    scales = np.where(top < 0x7F800000, top, 0x7FC00000).astype(np.int32).view(real)
    empty = (top == 0) | (top >= 0x7F800000)
    most = power(np.array(255 if second else 127), second)
    with np.errstate(all="ignore"):
        t = np.abs(x) / np.where(empty, 1, scales)[:, None] * most
        steps = power(np.arange(257 if second else 129), second)
        c = np.where(empty[:, None], 0, np.searchsorted(steps, t, side="right") - 1)
        low = power(c, second)
        d = np.pad(digits.astype(np.int32), (0, -n % BLOCK)).reshape(x.shape)
        d = (d >> 8) | ((d & 255) << 8) if second else d
        up = (d.astype(real) + real(0.5)) * (power(c + 1, second) - low) < (t - low) * real(65536)
    c = np.where(empty[:, None], 0, c + up)
    least = (t > 0) & ~empty[:, None]
    c = np.maximum(c, least) if second else np.where(np.signbit(x), -c, c)
    return c.astype(np.uint8 if second else np.int8).reshape(-1)[:n], scales
