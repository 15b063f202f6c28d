"""The runs of the margin studies, and the ladder on which their events are counted.

A *unit* is one seed, rate and mantissa; a cell holds the units of one rate and mantissa, because their
events are pooled in one histogram a cell. A unit is resumed where it stopped, in the middle if need be.

Histograms are kept in records as text: base64 of one LEB128 number a level (seven bits a byte, the last byte
below 128). A general compressor would save a third, and make a record depend on its version.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.numbers.grids import grid as named
from halfulp.paper.models import lockstep_kernels as compiled
from halfulp.paper.models.digests import digest, packed, unpacked
from halfulp.paper.models.mlp_kernels import CROSS_ENTROPY
from halfulp.paper.models.rounding_kernels import patterns
from halfulp.paper.models.teacher import Testbed, classification
from halfulp.paper.trust import PRIMARY
from halfulp.study.protocol import Config, Running

Array = npt.NDArray[Any]

CHUNK = 500
"""Steps between two checkpoints."""


# ---- runs ---------------------------------------------------------------------------------------------


class LockstepUnit:
    """A reference, and if it is measured a quantized run beside it, from the same stored start."""

    kept = ("w", "q", "mistakes")
    """The attributes that a checkpoint holds, beside the counts of every step."""

    def __init__(self, config: Config, seed: int, *, measure: bool) -> None:
        p = classification(
            seed, hidden=tuple(config["hidden"]), examples=config["examples"],
            label_noise=config["label_noise"], testbed=Testbed.of(config["testbed"]),
        )  # fmt: skip
        net, batch = p.net, p.train
        grid = named(config["grid"]).within(np.float64)
        stored = grid.round(torch.from_numpy(p.start)).numpy()
        self.w, self.q = stored.copy(), stored.copy()
        self.fingerprint = digest(batch.x, batch.y, stored)
        self.measure = measure
        self.mistakes = np.zeros(3, np.int64)
        self._rate, self._net = float(config["rate"]), (np.array(net.sizes), net.biased, CROSS_ENTROPY)
        self._batch, self._grid = (batch.x, batch.y, batch.n), patterns(config["grid"], np.float64)
        wide, n = batch.x.shape[1], net.count
        inner = np.zeros((net.units, wide)), np.zeros((max(net.units, 2), wide)), np.ones((1, wide))
        self._scratch = inner, np.zeros((3, n)), np.zeros((5, n)), np.zeros((4, n), np.int64)

    def advance(self, steps: int, total: Array, wrong: Array) -> Array:
        """Take steps, add their events to the histograms, and give the counts of each step."""
        out = np.zeros((steps, 6), np.int32)
        compiled.lockstep(
            (self.w, self.q), self._rate, self._net, self._batch, self._grid, level(PRIMARY), self.measure,
            self._scratch, (out, self.mistakes, total, wrong),
        )  # fmt: skip
        return out


class Finished:
    """The results of a unit: counts of every step, mistakes, digests."""

    def __init__(self, unit: LockstepUnit, seed: int, steps: Array) -> None:
        self.seed, self.n, self.steps, self.mistakes = seed, unit.w.size, steps, unit.mistakes
        self.fingerprint, self.end = unit.fingerprint, digest(unit.w)
        self.forecast = digest(steps[:, [compiled.FORECAST, compiled.SURE, compiled.OPEN]])

    def lower(self) -> Array:
        """Return the lower end of the frozen share at each step."""
        return np.asarray(self.steps[:, compiled.SURE] / self.n)

    def upper(self) -> Array:
        """Return the upper end of the frozen share at each step."""
        return np.asarray((self.steps[:, compiled.SURE] + self.steps[:, compiled.OPEN]) / self.n)


def histograms() -> tuple[Array, Array]:
    """Empty counts by score and level: of all events, and of the mistakes."""
    return np.zeros((2, compiled.LEVELS), np.int64), np.zeros((3, compiled.LEVELS), np.int64)


def run_units(cell: Running, *, measure: bool) -> tuple[list[Finished], Array, Array]:
    """Return the units of a cell, with checkpoints; and the histograms of all events and of the mistakes."""
    config, length = cell.config, cell.config["steps"]
    total, wrong = histograms()
    done, kept = [], unpacked(cell.load())
    for at, seed in enumerate(config["seeds"]):
        unit, steps = LockstepUnit(config, seed, measure=measure), np.zeros((0, 6), np.int32)
        if f"steps.{at}" in kept:
            steps, total, wrong = kept[f"steps.{at}"], kept["total"], kept["wrong"]
            for name in unit.kept:
                setattr(unit, name, kept[f"{name}.{at}"])
        while len(steps) < length:
            taken = unit.advance(min(CHUNK, length - len(steps)), total, wrong)
            steps = np.concatenate([steps, taken])
            kept |= {f"steps.{at}": steps, "total": total, "wrong": wrong}
            kept |= {f"{name}.{at}": getattr(unit, name) for name in unit.kept}
            cell.save(packed(kept))
            cell.progress(at * length + len(steps), len(config["seeds"]) * length)
        done.append(Finished(unit, seed, steps))
    return done, total, wrong


# ---- the ladder ---------------------------------------------------------------------------------------


def level(margin: float) -> int:
    """Return the level of a margin; margins above it stand on higher levels, for the thresholds of the study.

    >>> from halfulp.paper.trust import THRESHOLDS
    >>> [level(t) for t in THRESHOLDS]
    [0, 16, 32, 64, 128, 192, 256, 512, 768]
    >>> all(level(np.nextafter(t, 1)) == level(t) + 1 for t in THRESHOLDS)
    True
    """
    return int(compiled.level(float(margin)))


def answered(histogram: Array, thresholds: Iterable[float]) -> list[int]:
    """Return how many events have a margin above each threshold."""
    return [int(histogram[level(t) + 1 :].sum()) for t in thresholds]


def auroc_bound(right: Array, wrong: Array) -> float | None:
    """Bound how far an AUROC by level may be from the one by margin.

    A right and a wrong event on one level count one half; by margin they count 0, 1/2 or 1. So the two differ
    by at most half the share of such pairs: sum over levels of right * wrong / (2 * all right * all wrong).
    Level 0 is left out, because its margins are all zero: there the half is right.
    """
    right, wrong = right.tolist(), wrong.tolist()  # Python's integers do not overflow
    pairs = 2 * sum(right) * sum(wrong)
    return sum(r * w for r, w in zip(right[1:], wrong[1:], strict=True)) / pairs if pairs else None


def to_text(counts: Iterable[int]) -> str:
    """Counts as text.

    >>> to_text([0, 5, 300]), from_text("AAWsAg==").tolist()
    ('AAWsAg==', [0, 5, 300])
    """
    out = bytearray()
    for count in counts:
        rest = int(count)
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
    return base64.b64encode(bytes(out)).decode()


def from_text(text: str) -> Array:
    """Read counts back from their text."""
    parts = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    first = np.flatnonzero(np.concatenate([[True], parts[:-1] < 128]))
    place = np.arange(len(parts)) - np.repeat(first, np.diff(np.append(first, len(parts))))
    return np.add.reduceat((parts & 127).astype(np.int64) << (7 * place), first)
