"""The MNIST network: two 3x3 convolution-pool blocks, then 1568 -> 64 -> 10; 105,866 weights.

The network is plain torch in float64 on one flat weight vector (`descent` trains it). What the paper leaves
open is chosen here: padding 1 and 16 and 32 channels (which 1568 = 32 x 7 x 7 and the count of weights
fix), rectified linear units after every layer but the last, maximum pooling, torch's default start (uniform
in +-1 / sqrt(inputs of a unit)), images as (pixel / 255 - 0.1307) / 0.3081.

Threads are fixed by whoever calls (a study declares one), because they may change a sum.

>>> Cnn(seed=0).count
105866
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it

from halfulp.errors import CorruptionError
from halfulp.paper.models.mlp import Array

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
        """Return the number of weights."""
        return self.start.numel()

    def gradient(
        self, weights: torch.Tensor, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """Return the mean cross-entropy and its gradient."""
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
    """Read the first ``count`` digits of a pair of files, normalised."""
    pixels, classes = _idx(images, 3), _idx(labels, 1)
    if not len(pixels) == len(classes) >= count:
        raise CorruptionError(
            f"{images} and {labels} should hold at least {count} digits each: found {len(pixels)} and "
            f"{len(classes)}."
        )
    x = torch.from_numpy(pixels[:count].astype(np.float64))
    return ((x / 255 - 0.1307) / 0.3081)[:, None], torch.from_numpy(classes[:count].astype(np.int64))


def _idx(path: Path, dimensions: int) -> Array:
    """Read an array of bytes in the IDX format: 0, 0, 8, the number of dimensions, their sizes, the bytes."""
    content = gzip.decompress(path.read_bytes())
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != start + int(np.prod(shape)):
        raise CorruptionError(f"{path} is not an IDX file of {dimensions} dimensions of bytes.")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
