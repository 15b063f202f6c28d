"""The controlled testbeds: what the small networks learn, and where they start.

The paper fixes sizes, noise and losses and prints neither a start nor a teacher. What it leaves open is a
`Testbed`, and every study of the family takes the same one: `CHOSEN`. Inputs are standard normal unless it
says otherwise; a teacher has tanh units and no biases; noise is normal and of the given standard deviation;
labels of a classification are the teacher's largest output, some of them drawn anew where labels are noisy.

Why these numbers? They decide where windows lie, so they are the result of a declared search: study `testbed`
compares candidates with what the paper prints of its fp64 *references*, and `CHOSEN` is what its committed
record chose (a test compares the two). What fits is a small start: the student first leaves the saddle at
zero, both layers grow in proportion to themselves (|d| / |w| near rate x 0.6), the gradient falls when the
loss does, and only then updates freeze. From a larger start a handful of updates remove most of the error,
and crossings come within the first ten.

Each part of a testbed has its own generator, PCG64 seeded with (seed, part), so that a wider student sees
the same data and the same teacher.

>>> small, wide = teacher_student(7, width=4), teacher_student(7, width=64)
>>> bool((small.train.y == wide.train.y).all()), wide.net.count
(True, 641)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from halfulp.paper.models.mlp import Array, Examples, Net, outputs
from halfulp.paper.models.mlp_kernels import tanh_row

INPUTS, TEACHER, WIDTH, EXAMPLES, NOISE = 8, 8, 64, 512, 0.1
_DATA, _TEACHER, _NOISE, _START, _LABELS = range(5)


@dataclass(frozen=True, kw_only=True)
class Testbed:
    """The choices that the paper leaves open. Weights are normal; numbers are their standard deviations.

    ``by_inputs`` divides those of the start by the root of a layer's inputs. ``factor`` multiplies the
    squared loss, the mean over examples of the squared distance: 1/2 makes it half the mean square.
    ``standardised`` divides targets by their spread before noise is added, ``quiet_tests`` leaves the noise
    out of the test examples. Biases start at zero.
    """

    hidden: float
    output: float
    teacher_hidden: float
    teacher_output: float
    by_inputs: bool = False
    inputs: Literal["normal", "uniform"] = "normal"
    outputs: int = 1
    factor: float = 1.0
    standardised: bool = False
    quiet_tests: bool = False

    __test__ = False  # not a test, whatever its name begins with

    @staticmethod
    def of(config: Mapping[str, Any]) -> Testbed:
        """Build a testbed from the JSON of a config; `Testbed.json` is the inverse."""
        return Testbed(**config)

    def json(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return asdict(self)

    def spreads(self, net: Net) -> list[float]:
        """Return the standard deviation of every layer's weights at the start."""
        last = len(net.sizes) - 2
        each = [self.output if layer == last else self.hidden for layer in range(last + 1)]
        if not self.by_inputs:
            return each
        return [float(s / np.sqrt(n)) for s, n in zip(each, net.sizes, strict=False)]


CHOSEN = Testbed(hidden=0.018, output=0.036, teacher_hidden=0.5, teacher_output=8**-0.5)
"""The testbed that study `testbed` chose."""


@dataclass(frozen=True)
class Problem:
    """A net to train, the examples to train and test it on, and its start."""

    net: Net
    train: Examples
    test: Examples
    start: Array
    factor: float = 1.0
    """The factor of the squared loss. Descent at a rate is descent on the plain squared loss at ``factor``
    times that rate."""


def teacher_student(
    seed: int, *, width: int = WIDTH, examples: int = EXAMPLES, tests: int = EXAMPLES, noise: float = NOISE,
    testbed: Testbed = CHOSEN,
) -> Problem:  # fmt: skip
    """Return a regression on a noisy two-layer tanh teacher; all weights and biases are trained."""
    x, y = _taught(seed, examples + tests, testbed.outputs, testbed)
    if testbed.standardised:
        y /= y.std()
    noises = noise * _draw(seed, _NOISE).standard_normal(y.shape)
    if testbed.quiet_tests:
        noises[examples:] = 0.0
    net = Net(sizes=(INPUTS, width, testbed.outputs))
    return _problem(net, seed, x, y + noises, examples, testbed)


def classification(
    seed: int, *, hidden: tuple[int, ...] = (WIDTH,), classes: int = 4, examples: int = EXAMPLES,
    tests: int = EXAMPLES, label_noise: float = 0.0, testbed: Testbed = CHOSEN,
) -> Problem:  # fmt: skip
    """Return a classification by the same teacher: one output per class, cross-entropy against the largest.

    A share ``label_noise`` of the labels, tests included, is drawn anew from all classes.
    """
    x, scores = _taught(seed, examples + tests, classes, testbed)
    labels = scores.argmax(axis=1)
    drawn = _draw(seed, _LABELS)
    anew = drawn.random(len(labels)) < label_noise
    labels = np.where(anew, drawn.integers(0, classes, len(labels)), labels)
    net = Net(sizes=(INPUTS, *hidden, classes), loss="cross-entropy")
    return _problem(net, seed, x, np.eye(classes)[labels], examples, testbed)


def frozen_features(
    seed: int, *, context: int = 4, features: int = 64, readouts: int = 8, examples: int = EXAMPLES,
    tests: int = EXAMPLES, noise: float = NOISE, spread: float = 0.1,
) -> Problem:  # fmt: skip
    """Return a linear readout, with few outputs, of a fixed random map tanh(A c) of short contexts c.

    The targets are another readout of the same features plus noise, so only the readout's weights, which
    are all that is trained, decide the loss. They start normal with standard deviation ``spread``.
    """
    contexts = _draw(seed, _DATA).standard_normal((examples + tests, context))
    teacher, readout = _draw(seed, _TEACHER), Net(sizes=(features, readouts), biased=False)
    fixed = teacher.standard_normal(features * context) / np.sqrt(context)
    x = outputs(Net(sizes=(context, features), biased=False), fixed, contexts)
    tanh_row(x.reshape(-1))
    y = outputs(readout, teacher.standard_normal(readout.count), x)
    y += noise * _draw(seed, _NOISE).standard_normal(y.shape)
    start = spread * _draw(seed, _START).standard_normal(readout.count)
    return Problem(
        readout, Examples.of(x[:examples], y[:examples]), Examples.of(x[examples:], y[examples:]), start
    )


def _taught(seed: int, n: int, count: int, testbed: Testbed) -> tuple[Array, Array]:
    """Return inputs and the teacher's ``count`` outputs."""
    drawn = _draw(seed, _DATA)
    x = (
        drawn.standard_normal((n, INPUTS))
        if testbed.inputs == "normal"
        else drawn.uniform(-1, 1, (n, INPUTS))
    )
    teacher = Net(sizes=(INPUTS, TEACHER, count), biased=False)
    weights = _draw(seed, _TEACHER).standard_normal(teacher.count)
    weights[teacher.part("W1")] *= testbed.teacher_hidden
    weights[teacher.part("W2")] *= testbed.teacher_output
    return x, outputs(teacher, weights, x)


def _problem(net: Net, seed: int, x: Array, y: Array, examples: int, testbed: Testbed) -> Problem:
    start, spreads = _draw(seed, _START).standard_normal(net.count), testbed.spreads(net)
    for name, part in net.parts.items():
        start[part] *= spreads[int(name[1:]) - 1] if name.startswith("W") else 0.0
    train, test = Examples.of(x[:examples], y[:examples]), Examples.of(x[examples:], y[examples:])
    return Problem(net, train, test, start + 0.0, testbed.factor)  # + 0.0: no negative zeros


def _draw(seed: int, part: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, part]))
