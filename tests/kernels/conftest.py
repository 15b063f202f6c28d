"""Containers and shapes that tests of kernels run over."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import SHAPES
from oracle import CONTAINERS


@pytest.fixture(params=CONTAINERS, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param
