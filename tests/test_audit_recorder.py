"""The recorder against brute force, and everything that a training loop may do to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from audit_reference import GRIDS, MODELS, OPTIMIZERS, STATIC, Brute, batches, made, rates, train, weights

# ---- every number ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_number_is_that_of_brute_force(kind: str, name: str, tmp_path: Path) -> None:
    """Counts, phase and expectation of every tensor, grid and step; sums, rates and losses; names and order."""
    model = made(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    brute = Brute(GRIDS)
    with hu.Audit(optimizer, GRIDS, model=model, out=tmp_path / "trace", part_steps=2) as audit:
        train(model, optimizer, 3, brute=brute, audit=audit)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))
    assert len(brute.informative()) >= 10  # numbers that could have been wrong
