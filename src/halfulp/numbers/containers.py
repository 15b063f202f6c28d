"""Containers: the floating-point types that hold grid values in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Container:
    """The floating-point type that holds grid values in memory."""

    name: str
    mantissa: int
    emin: int
    emax: int

    @property
    def largest(self) -> float:
        """Return the largest finite value."""
        return math.ldexp(2.0 - 2.0**-self.mantissa, self.emax)


CONTAINERS = {
    "float64": Container(name="float64", mantissa=52, emin=-1022, emax=1023),
    "float32": Container(name="float32", mantissa=23, emin=-126, emax=127),
    "bfloat16": Container(name="bfloat16", mantissa=7, emin=-126, emax=127),
    "float16": Container(name="float16", mantissa=10, emin=-14, emax=15),
}
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
"""The grids of narrow dtypes, by the names that they are usually called."""


def container(dtype: torch.dtype | npt.DTypeLike) -> Container:
    """Return the container of a torch or NumPy dtype."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    if name not in CONTAINERS:
        raise UsageError(
            f"{name} cannot hold grid values: expected one of {', '.join(CONTAINERS)}. "
            "Cast the tensor to float32 first, or decode it if it holds codes."
        )
    return CONTAINERS[name]
