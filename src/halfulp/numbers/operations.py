"""The functions behind a grid's methods on tensors, which live in rooms that import grids."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


class Operations:
    """The functions behind a grid's methods on tensors.

    Kernels and events import grids, not the reverse, so the functions are looked up by name when a method is
    first called.
    """

    round: Callable[..., torch.Tensor]
    scales: Callable[..., torch.Tensor]
    encode: Callable[..., torch.Tensor]
    decode: Callable[..., torch.Tensor]
    gap: Callable[..., torch.Tensor]
    neighbours: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def __getattr__(self, name: str) -> Any:
        if name in ("gap", "neighbours"):
            function = getattr(import_module("halfulp.measures.events"), name)
        else:
            function = getattr(import_module("halfulp.kernels"), name)
        setattr(self, name, function)
        return function


OPERATIONS = Operations()
