"""The convolutional network: digits, the plain torch module, and cells of `cnn`."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from locked_cells import Alone, InterruptedCellError

import halfulp as hu
from halfulp import canonical
from halfulp.errors import CorruptionError
from halfulp.measures import events
from halfulp.paper.models.convolutional import Cnn, mnist
from halfulp.paper.models.descent import descend
from halfulp.paper.studies import _timing, cnn

IMAGES, LABELS = cnn.DATA


@pytest.fixture
def digits(tmp_path: Path) -> dict[str, Path]:
    """Twelve made-up digits in MNIST's format."""
    rng = np.random.Generator(np.random.PCG64(9))
    images, labels = tmp_path / "images.gz", tmp_path / "labels.gz"
    pixels = rng.integers(0, 256, (12, 28, 28), dtype=np.uint8).tobytes()
    images.write_bytes(gzip.compress(struct.pack(">BBBBIII", 0, 0, 8, 3, 12, 28, 28) + pixels))
    classes = (rng.integers(0, 10, 12, dtype=np.uint8)).tobytes()
    labels.write_bytes(gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 12) + classes))
    return {IMAGES: images, LABELS: labels}


def test_digits_are_read_and_damage_is_named(digits: dict[str, Path], tmp_path: Path) -> None:
    x, y = mnist(digits[IMAGES], digits[LABELS], 10)
    assert (x.shape, y.shape, x.dtype) == ((10, 1, 28, 28), (10,), torch.float64)
    first = gzip.decompress(digits[IMAGES].read_bytes())[16]
    assert float(x[0, 0, 0, 0]) == pytest.approx((first / 255 - 0.1307) / 0.3081, rel=1e-14)
    with pytest.raises(CorruptionError, match="should hold at least 13 digits each: found 12 and 12"):
        mnist(digits[IMAGES], digits[LABELS], 13)
    short = tmp_path / "short.gz"
    short.write_bytes(gzip.compress(gzip.decompress(digits[LABELS].read_bytes())[:-1]))
    with pytest.raises(CorruptionError, match=r"short\.gz is not an IDX file of 1 dimensions"):
        mnist(digits[IMAGES], short, 5)


def test_the_network_is_the_module(digits: dict[str, Path]) -> None:
    """The gradient is that of the plain torch module, bit for bit: the same calls on the same numbers."""
    x, y = mnist(digits[IMAGES], digits[LABELS], 8)
    net = Cnn(3)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(1568, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    ).double()  # fmt: skip
    torch.nn.utils.vector_to_parameters(net.start, module.parameters())
    loss = torch.nn.functional.cross_entropy(module(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    found, gradient = net.gradient(net.start, x, y)
    assert found == loss.item()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    assert torch.equal(gradient, expected)


def test_cnn_cells(digits: dict[str, Path]) -> None:
    """Events against the public functions; resumed runs are the same run; every stage gives JSON."""
    x, y = mnist(digits[IMAGES], digits[LABELS], 8)
    net = Cnn(0)
    series = descend(
        lambda w: net.gradient(w, x, y), net.start, rate=0.2, steps=3, store="m6", audit=["m6", "m9"]
    )
    grid = hu.grid("m6")
    w = grid.round(Cnn(0).start)
    for t in range(3):
        d = -0.2 * Cnn(0).gradient(w, x, y)[1]
        assert series.frozen[t] == series.audited("m6")[t] == int(events.frozen(w, d, "m6").sum())
        assert series.symmetric("m6")[t] == int(events.symmetric_frozen(w, d, "m6").sum())
        w = grid.round(w + d)
    config = {"digits": 8, "steps": 205, "mantissas": [7], "rate": 0.2, "seed": 0}
    whole = cnn.TIMED.measure(Alone("a.m7", {**config, "reference": "a", "grid": "m7"}, {}, data=digits))  # type: ignore[arg-type]
    fake = Alone("a.m7", {**config, "reference": "a", "grid": "m7"}, {}, dies_after=2, data=digits)
    with pytest.raises(InterruptedCellError):
        cnn.TIMED.measure(fake)  # type: ignore[arg-type]
    assert canonical.dumps(cnn.TIMED.measure(fake)) == canonical.dumps(whole)  # type: ignore[arg-type]
    other = Alone("a", config, {}, data=digits)
    beside = cnn.bf16(other)  # type: ignore[arg-type]
    assert canonical.dumps(beside)
    assert 0 < _timing.bf16_rmse({"bf16": {"a": beside}})["cnn"] < 0.2
