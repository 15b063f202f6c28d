"""The controlled testbeds: what the small networks learn, and where they start.

The paper fixes sizes, noise and losses; what it leaves open is chosen here, once, for every study:

* inputs are standard normal; the teacher has tanh units with weights N(0, 1 / inputs), an output layer
  N(0, 1), and no biases; noise is normal with the given standard deviation;
* labels of a classification are the teacher's largest output (no noise: the labels are what is learned);
* students start with weights N(0, 0.1**2) and biases zero; the squared loss is the mean square.

Why these? They decide where windows lie, so they were inferred from what the paper prints of its *fp64
references alone*: the predicted windows of the effective-mantissa testbed (tab:e4-window, right column) and
the optimizer's ceiling. Of 14 combinations of start and teacher with either scale of the squared loss, two
give all five predicted windows; this is the plainer one (the other divides targets by their spread and
starts at half the spread). No run on a grid took part in the choice. Small weights grow in proportion to
themselves, so |d| / |w| stays near rate x 0.6 until the loss falls, and a mantissa bit less costs a factor of
two in rate: the pattern of that table. (A start like ``torch.nn.Linear``'s has no such phase; see
docs/controlled.md.)

Each part of a testbed has its own generator, PCG64 seeded with (seed, part), so that a wider student sees
the same data and the same teacher.

>>> small, wide = teacher_student(7, width=4), teacher_student(7, width=64)
>>> bool((small.train.y == wide.train.y).all()), wide.net.count
(True, 641)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfulp.models.mlp import Array, Batch, Net, outputs
from halfulp.models.mlp_kernels import tanh_row

INPUTS, TEACHER, WIDTH, EXAMPLES, NOISE = 8, 8, 64, 512, 0.1
SPREAD = 0.1
"""Standard deviation of the weights that a student starts with."""
_DATA, _TEACHER, _NOISE, _START = range(4)


@dataclass(frozen=True)
class Problem:
    """What is trained, on what, from where, and the examples that it is tested on."""

    net: Net
    train: Batch
    test: Batch
    start: Array


def teacher_student(
    seed: int, *, width: int = WIDTH, examples: int = EXAMPLES, tests: int = EXAMPLES, noise: float = NOISE
) -> Problem:
    """Regression on a noisy two-layer tanh teacher; all weights and biases are trained."""
    x, y = _taught(seed, examples + tests, 1)
    y += noise * _draw(seed, _NOISE).standard_normal(y.shape)
    return _problem(Net(sizes=(INPUTS, width, 1)), seed, x, y, examples)


def classification(
    seed: int, *, hidden: tuple[int, ...] = (WIDTH,), classes: int = 4, examples: int = EXAMPLES,
    tests: int = EXAMPLES,
) -> Problem:  # fmt: skip
    """The same teacher with one output a class; cross-entropy against its largest output."""
    x, scores = _taught(seed, examples + tests, classes)
    y = np.eye(classes)[scores.argmax(axis=1)]
    return _problem(Net(sizes=(INPUTS, *hidden, classes), loss="cross-entropy"), seed, x, y, examples)


def frozen_features(
    seed: int, *, context: int = 4, features: int = 8, readouts: int = 16, examples: int = EXAMPLES,
    tests: int = EXAMPLES, noise: float = NOISE,
) -> Problem:  # fmt: skip
    """A linear readout of a fixed random map tanh(A c) with few outputs, of contexts c of a few values.

    The targets are another readout of the same features plus noise, so only the readout's weights, which
    are all that is trained, decide the loss."""
    contexts = _draw(seed, _DATA).standard_normal((examples + tests, context))
    teacher, readout = _draw(seed, _TEACHER), Net(sizes=(features, readouts), biased=False)
    fixed = teacher.standard_normal(features * context) / np.sqrt(context)
    x = outputs(Net(sizes=(context, features), biased=False), fixed, contexts)
    tanh_row(x.reshape(-1))
    y = outputs(readout, teacher.standard_normal(readout.count), x)
    y += noise * _draw(seed, _NOISE).standard_normal(y.shape)
    return _problem(readout, seed, x, y, examples)


def _taught(seed: int, n: int, count: int) -> tuple[Array, Array]:
    """Inputs and the teacher's ``count`` outputs."""
    x = _draw(seed, _DATA).standard_normal((n, INPUTS))
    teacher = Net(sizes=(INPUTS, TEACHER, count), biased=False)
    weights = _draw(seed, _TEACHER).standard_normal(teacher.count)
    weights[teacher.part("W1")] /= np.sqrt(INPUTS)
    return x, outputs(teacher, weights, x)


def _problem(net: Net, seed: int, x: Array, y: Array, examples: int) -> Problem:
    start = SPREAD * _draw(seed, _START).standard_normal(net.count)
    for name, part in net.parts.items():
        if name.startswith("b"):
            start[part] = 0.0
    return Problem(net, Batch.of(x[:examples], y[:examples]), Batch.of(x[examples:], y[examples:]), start)


def _draw(seed: int, part: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, part]))
