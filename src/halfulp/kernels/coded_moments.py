"""Moments in eight bits: a code per value, and the largest magnitude of each 64 values as their scale.

With s the largest magnitude of a block, a first moment is s c|c| / 127**2 for a signed code c, finer
near zero. A second moment is s c**4 / 255**4, so that its root, which a step divides by, is a square of
the code, too: it spans four and a half decades, and gradients that differ a thousandfold are kept apart.

Values are rounded stochastically between neighbouring codes, with the probability that makes them right on
average. That is what a moment needs: with beta2 = .999 a second moment moves by a thousandth of itself in a
step, and the gaps of codes are 1.6% of it at best, so that nearest rounding keeps it from moving within its
block. The digits of a first moment are those of a short stream (:mod:`halfulp.numbers.streams`), those of the
second moment the same with their two bytes exchanged. A digit d of 16 bits goes up if d + 1/2 is below 65536
times the probability.

Two rules are about safety. A second moment that is not zero has a code of at least 1: a step divides by its
root, so one that is rounded to zero would make the largest step of all. And a value that is not finite makes
its block's scale NaN.

Everything is float32, every operation rounded by itself. ``native/moments.cpp`` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from halfulp.kernels import fallback, native
from halfulp.kernels.onepass import Case, Job, Jobs
from halfulp.kernels.plan import Counted
from halfulp.kernels.reference import TILE, tiles_of

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
        found = decoded(coded.codes.numpy().reshape(-1), coded.scales.numpy().reshape(-1))
        values.view(-1).copy_(torch.from_numpy(found))
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
        digits = fallback.keyed(key, offset, 16).words(values.numel())
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


# ---- a step --------------------------------------------------------------------------------------------

CHUNK = 256  # tiles: the moments of as many are a megabyte and a half in float32, and stay in the caches


class CodedJobs:
    """A tensor whose moments are coded: :class:`~halfulp.kernels.onepass.Jobs` of it, chunk by chunk.

    The moments of a chunk are decoded, the step is that of float32 moments, and they are coded again.
    """

    def __init__(self, case: Case, job: Job, moments: Sequence[Coded]) -> None:
        self.case, self.jobs = case, [job]
        size = job.first.numel()
        room = torch.empty((len(moments), min(size, CHUNK * TILE)), dtype=torch.float32, device="cpu")
        self._chunks: list[tuple[slice, Jobs, list[tuple[Coded, torch.Tensor]]]] = []
        for start in range(0, max(size, 1), CHUNK * TILE):  # a rank may have no rows
            here = slice(start, min(start + CHUNK * TILE, size))
            parts = [(_part(coded, here), room[i, : here.stop - start]) for i, coded in enumerate(moments)]
            inner = _part_of_job(job, here, case.grid.bits, [values for _, values in parts])
            self._chunks.append((here, Jobs(replace(case, drawn=False), [inner]), parts))

    def __call__(self, grads: Sequence[torch.Tensor], rates: Array, keys: Array) -> Counted:
        """Make one step: see :class:`~halfulp.kernels.onepass.Jobs`."""
        (grad,) = grads
        key = int(keys[0, 2]), int(keys[0, 3])
        found = []
        for here, jobs, parts in self._chunks:
            for coded, values in parts:
                decode(coded, values)
            (counted,) = jobs([grad.view(-1)[here]], rates, keys)
            found.append(counted)
            for coded, values in parts:
                encode(values, coded, key, self.jobs[0].offset + here.start)
        counts, sums = zip(*found, strict=True)
        return [(torch.cat(counts), torch.cat(sums))]


def _part(coded: Coded, here: slice) -> Coded:
    blocks = slice(here.start // BLOCK, -(-here.stop // BLOCK))
    return Coded(coded.codes.view(-1)[here], coded.scales.view(-1)[blocks])


def _part_of_job(job: Job, here: slice, bits: int, moments: Sequence[torch.Tensor]) -> Job:
    size, n = job.first.numel(), here.stop - here.start
    stored = job.stored.view(-1)
    packed = stored.numel() < size  # a chunk is whole bytes at every width
    at = slice(here.start * bits // 8, -(-here.stop * bits // 8)) if packed else here
    return replace(
        job, stored=stored[at], first=moments[0], second=(*moments[1:], None)[0],
        kept=None if job.kept is None else job.kept.view(-1)[here],
        moved=None if job.moved is None else job.moved[here.start // 8 : -(-here.stop // 8)],
        offset=job.offset + here.start, plain=min(max(job.plain - here.start, 0), n),
    )  # fmt: skip


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
        root = np.sqrt(np.sqrt(t)) if second else np.sqrt(t)
        c = np.where(empty[:, None], 0, root).astype(np.int32)
        low = power(c, second)
        d = np.pad(digits.astype(np.int32), (0, -n % BLOCK)).reshape(x.shape)
        d = (d >> 8) | ((d & 255) << 8) if second else d
        up = (d.astype(real) + real(0.5)) * (power(c + 1, second) - low) < (t - low) * real(65536)
    c = np.where(empty[:, None], 0, c + up)
    least = (t > 0) & ~empty[:, None]
    c = np.maximum(c, least) if second else np.where(np.signbit(x), -c, c)
    return c.astype(np.uint8 if second else np.int8).reshape(-1)[:n], scales
