"""Small tanh networks, trained whole-batch, with every update audited or written to a grid.

A `Net` says what is trained, `Examples` on what, a `Trainer` how; `Trainer.advance` takes steps at full
speed and gives back what happened in each (`Series`). One class serves references and measured runs:

    reference   Trainer(net, batch, start, rate=0.1, audit=["m5", "m7"])       weights keep every bit
    measured    Trainer(net, batch, start, rate=0.1, store="m7")                nearest write-back
    stochastic  Trainer(net, batch, start, rate=0.1, store="m7", stochastic=3)

A step is: gradient at the stored weights w, proposal d, events of the audited grids at Q(w) (Eq. 4 of the
paper), z = w + d, write-back, event of the write-back (new == old). Rounding is that of ``halfulp.grid``, in
compiled form; stochastic rounding takes its words from ``Stream(seed=stochastic,
name="weights", step=t)``, with the start projected at step 0 and steps from 1. Sums have a fixed order (see
:mod:`halfulp.paper.models.mlp_kernels`), so a run is the same on every machine, in whatever chunks it is
taken, and after `Trainer.state` and `Trainer.restore`.

A run *diverges* when a weight is not a number or exceeds 2**300; it stops after that step.

>>> net = Net(sizes=(2, 3, 1))
>>> batch = Examples.of([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [[1.0], [1.0], [0.0]])
>>> run = Trainer(net, batch, np.linspace(-1, 1, net.count), rate=0.1, store="m5", audit=["m5"])
>>> series = run.advance(50)
>>> bool((series.audited("m5") == series.frozen).all()), run.step
(True, 50)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.numbers.grids import grid as named
from halfulp.numbers.streams import Stream
from halfulp.paper.models import mlp_kernels as compiled
from halfulp.paper.models.digests import packed, unpacked
from halfulp.paper.models.rounding_kernels import patterns
from halfulp.study.protocol import Running

Array = npt.NDArray[Any]
Loss = Literal["squared", "cross-entropy"]
Optimizer = Literal["gd", "adam"]
BETAS, EPS = (0.9, 0.999), 1e-8
"""Of Adam."""

CHUNK = 500
"""Steps between two checkpoints of :func:`run`."""
STREAM = "weights"
"""The name under which a trainer's flat weight vector draws random words."""


@dataclass(frozen=True, kw_only=True)
class Net:
    """Fully connected layers with tanh between them and nothing after the last.

    Weights are one flat vector: for each layer W (outputs, inputs) by rows, then b. The squared loss is the
    mean over examples of |out - y|**2; cross-entropy takes one-hot targets.

    >>> net = Net(sizes=(8, 64, 1))
    >>> net.count, net.part("W1"), net.part("b2")
    (641, slice(0, 512, None), slice(640, 641, None))
    """

    sizes: tuple[int, ...]
    loss: Loss = "squared"
    biased: bool = True

    @property
    def parts(self) -> dict[str, slice]:
        """The slice of the flat vector that holds each tensor: W1, b1, W2, ..."""
        slices, at = {}, 0
        for layer, (n_in, n_out) in enumerate(zip(self.sizes, self.sizes[1:], strict=False), 1):
            slices[f"W{layer}"] = slice(at, at + n_in * n_out)
            at += n_in * n_out
            if self.biased:
                slices[f"b{layer}"] = slice(at, at + n_out)
                at += n_out
        return slices

    def part(self, name: str) -> slice:
        """Return the slice of the flat vector that holds a tensor."""
        return self.parts[name]

    @property
    def count(self) -> int:
        """The number of weights."""
        return sum(
            n_out * (n_in + self.biased) for n_in, n_out in zip(self.sizes, self.sizes[1:], strict=False)
        )

    @property
    def units(self) -> int:
        """Return the number of units after the input."""
        return sum(self.sizes[1:])


@dataclass(frozen=True)
class Examples:
    """Inputs and targets as the kernels want them: (dimension, examples), padded to whole blocks."""

    x: Array
    y: Array
    n: int

    def __post_init__(self) -> None:
        width = self.x.shape[1]
        if width % compiled.PADDING or self.y.shape[1] != width or not 0 <= self.n <= width:
            raise UsageError(
                f"x and y of examples have one column an example, padded to whole {compiled.PADDING}s: "
                f"found {width} and {self.y.shape[1]} columns for {self.n} of them. Make it with Examples.of."
            )

    @staticmethod
    def of(x: npt.ArrayLike, y: npt.ArrayLike, dtype: npt.DTypeLike = np.float64) -> Examples:
        """Build examples from arrays with one example per row."""
        rows, targets = np.asarray(x, dtype=dtype), np.asarray(y, dtype=dtype)
        if rows.ndim != 2 or targets.ndim != 2 or len(rows) != len(targets) or not len(rows):
            raise UsageError(
                f"a batch is one example a row, x and y alike: found shapes {rows.shape} and {targets.shape}."
            )
        return Examples(_blocks(rows), _blocks(targets), len(rows))

    def to(self, dtype: npt.DTypeLike) -> Examples:
        """Return the examples in another dtype."""
        return Examples(self.x.astype(dtype), self.y.astype(dtype), self.n)


def outputs(net: Net, weights: Array, x: npt.ArrayLike) -> Array:
    """Compute a net's outputs for examples, one per row, summing in the same order as training.

    >>> outputs(Net(sizes=(2, 1), biased=False), np.array([1.0, 2.0]), [[3.0, 4.0]])
    array([[11.]])
    """
    rows = np.asarray(x, dtype=weights.dtype)
    wide = _blocks(rows)
    acts = np.zeros((net.units, wide.shape[1]), weights.dtype)
    compiled.forward(weights, np.array(net.sizes), net.biased, wide, acts)
    return acts[-net.sizes[-1] :, : len(rows)].T.copy()


def _blocks(rows: Array) -> Array:
    """(dimension, examples), padded with zeros to whole blocks."""
    return np.ascontiguousarray(np.pad(rows, ((0, -len(rows) % compiled.PADDING), (0, 0))).T)


@dataclass(frozen=True)
class Series:
    """The history of consecutive steps, one row per step. Counts cover the trainer's span."""

    grids: tuple[str, ...]
    size: int
    """Coordinates in the span."""
    loss: Array
    """Training loss before the step."""
    test: Array
    """Test loss after the step; empty without a test batch."""
    frozen: Array
    """Coordinates that the step left unchanged."""
    counts: Array
    """(steps, grids, 2): frozen by code at the projected weights, and by symmetric spacing."""
    squares: Array
    """(steps, 2): sums of squares of weights and of proposals."""
    never: Array
    """Coordinates that no step so far has moved."""

    def __len__(self) -> int:
        return len(self.loss)

    def audited(self, grid: str) -> Array:
        """Counts of the projected event of a grid."""
        return np.asarray(self.counts[:, self.grids.index(grid), 0])

    def symmetric(self, grid: str) -> Array:
        """Counts of the symmetric-spacing event of a grid."""
        return np.asarray(self.counts[:, self.grids.index(grid), 1])

    def then(self, other: Series) -> Series:
        """Return this series joined with the one that follows it."""
        joined = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _ARRAYS}
        return Series(self.grids, self.size, **joined)


_ARRAYS = tuple(f.name for f in fields(Series))[2:]


class Trainer:
    """Whole-batch training of a net; see the module's docstring.

    ``weights`` are the stored ones after ``step`` steps, ``proposal`` is the last d (at the weights before
    it). The dtype of the start decides the arithmetic: float64, or float32. ``span`` limits events and
    counts to a part of the flat vector, for example ``net.part("W1")``. ``stochastic`` is the seed of
    stochastic rounding to ``store``; without one it is to nearest. With ``test`` the test loss is taken after
    every step.
    """

    def __init__(
        self,
        net: Net,
        batch: Examples,
        start: Array,
        *,
        rate: float,
        optimizer: Optimizer = "gd",
        store: str | None = None,
        stochastic: int | None = None,
        audit: Sequence[str] = (),
        test: Examples | None = None,
        span: slice | None = None,
    ) -> None:
        if start.shape != (net.count,) or start.dtype.name not in ("float64", "float32"):
            raise UsageError(
                f"the start of a net of sizes {net.sizes} is {net.count} float64 or float32 numbers: found "
                f"shape {start.shape}, {start.dtype}."
            )
        if batch.x.shape[0] != net.sizes[0] or batch.y.shape[0] != net.sizes[-1]:
            raise UsageError(
                f"a net of sizes {net.sizes} takes x of {net.sizes[0]} and y of {net.sizes[-1]} columns: "
                f"found {batch.x.shape[0]} and {batch.y.shape[0]}."
            )
        self.net, self.grids = net, tuple(audit)
        self.step, self.diverged = 0, False
        self._seed = stochastic or 0
        self._store = None if store is None else named(store).within(start.dtype)
        rounding = compiled.NEAREST if stochastic is None else compiled.STOCHASTIC
        how = compiled.KEPT if store is None else rounding
        inner = slice(0, net.count) if span is None else span
        self._span = (inner.start, inner.stop)
        self.weights = self._projected(start, how)
        self.proposal = np.zeros_like(self.weights)
        self._moments = np.zeros((2, net.count), dtype=start.dtype)
        self._moved = np.zeros(net.count, dtype=np.bool_)

        sizes = np.array(net.sizes)
        self._net = (sizes, net.biased, ("squared", "cross-entropy").index(net.loss))
        self._batch, self._test = batch.to(start.dtype), None if test is None else test.to(start.dtype)
        empty = Examples(self._batch.x[:, :0], self._batch.y[:, :0], 0)
        self._tested = self._test or empty
        self._rule = (("gd", "adam").index(optimizer), start.dtype.type(rate), np.array([*BETAS, EPS]))
        audited = [patterns(g, start.dtype) for g in self.grids]
        ups = [2.0 ** (named(g).mantissa + 1) for g in self.grids]
        self._grids = (np.array(audited, np.int64).reshape(-1, 4), np.array(ups, start.dtype))
        self._policy = (how, patterns(store or "m7", start.dtype))
        width = self._batch.x.shape[1]
        self._scratch = (
            np.zeros((net.units, width), start.dtype),
            np.zeros((max(net.units, 2), width), start.dtype),
            np.ones((1, width), start.dtype),
        )
        self._test_acts = np.zeros((net.units, self._tested.x.shape[1]), start.dtype)
        self._gradient, self._sum = np.zeros_like(self.weights), np.zeros_like(self.weights)

    def _projected(self, start: Array, how: int) -> Array:
        """Return the start as it is stored."""
        if self._store is None:
            return start.copy()
        stream = Stream(seed=self._seed, name=STREAM) if how == compiled.STOCHASTIC else None
        return self._store.round(torch.from_numpy(start.copy()), stochastic=stream).numpy()

    def advance(self, steps: int) -> Series:
        """Take steps; fewer if the run diverges (``diverged`` is then set, and no more can be taken)."""
        if self.diverged:
            raise UsageError(f"the run diverged at step {self.step}: no further step can be taken.")
        coming = range(self.step + 1, self.step + steps + 1)
        powers = np.array([[b**t for b in BETAS] for t in coming]).reshape(-1, 2)
        keys = np.zeros((steps, 2), dtype=np.uint32)
        if self._policy[0] == compiled.STOCHASTIC:
            for row, t in zip(keys, coming, strict=True):
                row[:] = Stream(seed=self._seed, name=STREAM, step=t).key
        out = (
            np.zeros(steps), np.zeros(steps), np.zeros(steps, np.int32),
            np.zeros((steps, len(self.grids), 2), np.int32), np.zeros((steps, 2)), np.zeros(steps, np.int32),
        )  # fmt: skip
        b, tested = self._batch, self._tested
        state = self.weights, self._gradient, self.proposal, self._sum, *self._moments, self._moved
        taken = compiled.train(
            state, self._net, (b.x, b.y, b.n), (tested.x, tested.y, tested.n), (*self._rule, powers),
            self._grids, (*self._policy, keys), self._span, (self._scratch, self._test_acts), out,
        )  # fmt: skip
        self.step += taken
        self.diverged = not bool(np.all(np.abs(self.weights.astype(np.float64)) < compiled.LIMIT))
        loss, test, *rest = (a[:taken] for a in out)
        size = self._span[1] - self._span[0]
        return Series(self.grids, size, loss, test if tested.n else test[:0], *rest)

    def gradient(self, weights: Array | None = None) -> Array:
        """Return the gradient of the training loss, at the stored weights or at others."""
        w = self.weights if weights is None else np.ascontiguousarray(weights, self.weights.dtype)
        b, g = self._batch, np.zeros_like(w)
        compiled.gradient(w, self._net, (b.x, b.y, b.n), self._scratch, g)
        return g

    def error(self, batch: Examples, weights: Array | None = None) -> float:
        """Return the loss on a batch, at the stored weights or at others."""
        w = self.weights if weights is None else np.ascontiguousarray(weights, self.weights.dtype)
        b = batch.to(w.dtype)
        acts = np.zeros((self.net.units, b.x.shape[1]), w.dtype)
        return float(compiled.error(w, self._net, (b.x, b.y, b.n), acts))

    # ---- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Array]:
        """Return all that changes from step to step."""
        return {
            "step": np.array(self.step), "weights": self.weights.copy(), "proposal": self.proposal.copy(),
            "moments": self._moments.copy(), "moved": self._moved.copy(),
        }  # fmt: skip

    def restore(self, state: dict[str, Array]) -> None:
        """Continue from the state of a trainer with the same settings."""
        self.step = int(state["step"])
        for name, mine in (
            ("weights", self.weights), ("proposal", self.proposal), ("moments", self._moments),
            ("moved", self._moved),
        ):  # fmt: skip
            mine[...] = state[name]
        self.diverged = not bool(np.all(np.abs(self.weights.astype(np.float64)) < compiled.LIMIT))


def run(trainer: Trainer, steps: int, running: Running | None = None, chunk: int = CHUNK) -> Series:
    """Take steps up to a total, with a checkpoint after every chunk; goes on from one if there is one."""
    series = trainer.advance(0)
    if running is not None and (kept := unpacked(running.load())):
        trainer.restore({k[6:]: array for k, array in kept.items() if k.startswith("state.")})
        series = Series(series.grids, series.size, *(kept[name] for name in _ARRAYS))
    while trainer.step < steps and not trainer.diverged:
        series = series.then(trainer.advance(min(chunk, steps - trainer.step)))
        if running is not None:
            running.progress(trainer.step, steps)
            if trainer.step < steps and not trainer.diverged:
                state = {f"state.{name}": value for name, value in trainer.state().items()}
                running.save(packed(state | {name: getattr(series, name) for name in _ARRAYS}))
    return series
