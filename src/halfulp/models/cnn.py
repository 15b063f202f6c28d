"""The MNIST network: two 3x3 convolution-pool blocks, then 1568 -> 64 -> 10; 105,866 weights.

Convolutions of this size keep a processor busy by themselves, so the network is plain torch in float64 on
one flat weight vector; the audit of all grids and the write-back are the library's kernels. What the paper
leaves open is chosen here: padding 1 and 16 and 32 channels (which 1568 = 32 x 7 x 7 and the count of weights
fix), rectified linear units after every layer but the last, maximum pooling, torch's default start (uniform
in +-1 / sqrt(inputs of a unit)), images as (pixel / 255 - 0.1307) / 0.3081.

Threads are fixed by whoever calls (a study declares one), because they may change a sum.

>>> Cnn(seed=0).count
105866
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it

from halfulp import kernels
from halfulp.errors import CorruptionError
from halfulp.grids import grid as named
from halfulp.models.mlp import Array, Series
from halfulp.study.protocol import Running

CHUNK = 100
"""Steps between two checkpoints of :func:`train`."""

Storage = Literal["grid", "bfloat16"]


SHAPES = ((16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (64, 1568), (64,), (10, 64), (10,))


class Cnn:
    """The network as functions of one flat vector of float64 weights, and where it starts."""

    def __init__(self, seed: int) -> None:
        drawn = np.random.Generator(np.random.PCG64(seed))
        each, width = [], 1.0
        for shape in SHAPES:
            if len(shape) > 1:  # a bias has the bounds of the matrix before it
                width = math.prod(shape[1:]) ** -0.5
            each.append(drawn.uniform(-width, width, math.prod(shape)))
        self.start = torch.from_numpy(np.concatenate(each))

    @property
    def count(self) -> int:
        return self.start.numel()

    def gradient(
        self, weights: torch.Tensor, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """The mean cross-entropy and its gradient."""
        flat = weights.detach().requires_grad_()
        parts = torch.split(flat, [math.prod(shape) for shape in SHAPES])
        w = [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]
        x = images
        for kernel, bias in (w[0:2], w[2:4]):
            x = F.max_pool2d(torch.relu(F.conv2d(x, kernel, bias, padding=1)), 2)
        x = F.linear(torch.relu(F.linear(x.flatten(1), w[4], w[5])), w[6], w[7])
        loss = F.cross_entropy(x, labels)
        return loss.item(), torch.autograd.grad(loss, flat)[0]


def mnist(images: Path, labels: Path, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` digits of a pair of files, normalised."""
    pixels, classes = _idx(images, 3), _idx(labels, 1)
    if not len(pixels) == len(classes) >= count:
        raise CorruptionError(
            f"{images} and {labels} should hold at least {count} digits each: found {len(pixels)} and "
            f"{len(classes)}."
        )
    x = torch.from_numpy(pixels[:count].astype(np.float64))
    return ((x / 255 - 0.1307) / 0.3081)[:, None], torch.from_numpy(classes[:count].astype(np.int64))


def _idx(path: Path, dimensions: int) -> Array:
    """An array of bytes in the IDX format: 0, 0, 8, the number of dimensions, their sizes, the bytes."""
    content = gzip.decompress(path.read_bytes())
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != start + int(np.prod(shape)):
        raise CorruptionError(f"{path} is not an IDX file of {dimensions} dimensions of bytes.")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def train(
    net: Cnn,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    rate: float,
    steps: int,
    store: str | None = None,
    audit: Sequence[str] = (),
    storage: Storage = "grid",
    running: Running | None = None,
) -> Series:
    """Whole-batch descent from the network's start, as :class:`halfulp.models.mlp.Trainer` does it.

    ``storage="bfloat16"`` keeps the weights in a bfloat16 tensor that ``torch.optim.SGD`` updates with a
    bfloat16 gradient; the network still computes in float64.
    """
    target = None if store is None else named(store)
    grids = [named(name) for name in audit]
    weights = net.start.clone() if target is None else target.round(net.start)
    stored = torch.nn.Parameter(weights.to(torch.bfloat16)) if storage == "bfloat16" else None
    optimizer = None if stored is None else torch.optim.SGD([stored], lr=rate)
    loss, frozen, counts = (
        np.zeros(steps),
        np.zeros(steps, np.int32),
        np.zeros((steps, len(grids), 2), np.int32),
    )
    squares, never = np.zeros((steps, 2)), np.zeros(steps, np.int32)
    moved = torch.zeros(net.count, dtype=torch.bool)
    series: dict[str, Array] = {
        "loss": loss,
        "frozen": frozen,
        "counts": counts,
        "squares": squares,
        "never": never,
    }
    done = 0
    if running is not None and (kept := running.load()) is not None:
        with np.load(io.BytesIO(kept), allow_pickle=False) as file:
            done = int(file["done"])
            weights, moved = torch.from_numpy(file["weights"]), torch.from_numpy(file["moved"])
            for name, array in series.items():
                array[:] = file[name]
    for t in range(done, steps):
        loss[t], gradient = net.gradient(weights, images, labels)
        proposal = -rate * gradient
        if grids:
            found = kernels.audit(weights, proposal, grids)
            counts[t] = found.counts[:, :, _AUDITED].sum(dim=0).numpy()
        squares[t] = float(weights.square().sum()), float(proposal.square().sum())
        if stored is not None and optimizer is not None:
            stored.data.copy_(weights)
            stored.grad = gradient.to(torch.bfloat16)
            optimizer.step()
            new = stored.detach().double()
        else:
            new = weights + proposal
            new = new if target is None else target.round(new)
        moved |= new != weights
        frozen[t], never[t] = int((new == weights).sum()), int((~moved).sum())
        weights = new
        if running is not None and (t + 1) % CHUNK == 0 and t + 1 < steps:
            running.progress(t + 1, steps)
            running.save(_packed(t + 1, weights, moved, series))
    return Series(tuple(audit), net.count, loss, np.zeros(0), frozen, counts, squares, never)


_AUDITED = [kernels.AUDIT_COUNTS.index(name) for name in ("frozen", "symmetric")]


def _packed(done: int, weights: torch.Tensor, moved: torch.Tensor, series: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, done=done, weights=weights.numpy(), moved=moved.numpy(), **series)
    return file.getvalue()
