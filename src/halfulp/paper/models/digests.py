"""Arrays as bytes: by which number a study knows them again, and as a cell keeps them in a checkpoint."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.errors import TamperingError


def refuse_other(cell: str, sealed: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to judge a forecast other than the sealed one: its digests must be those of the seal."""
    for key, value in current.items():
        if sealed[key] != value:
            raise TamperingError(
                f"cell {cell}: {key} is not what the forecast sealed (expected {str(sealed[key])[:16]}..., "
                f"found {str(value)[:16]}...). The outcome would be compared with another forecast; run the "
                "study again from its seal, in the sealed environment."
            )


def digest(*arrays: npt.NDArray[Any]) -> str:
    """Return the SHA-256 of arrays, their types and shapes; -0 counts as +0."""
    whole = hashlib.sha256()
    for a in arrays:
        whole.update(f"{a.dtype.str}{a.shape}".encode())
        whole.update(np.ascontiguousarray(a + a.dtype.type(0)).tobytes())
    return whole.hexdigest()


def packed(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays as the bytes of a checkpoint."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpacked(state: bytes | None) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a checkpoint; an empty dict if there is no checkpoint."""
    if state is None:
        return {}
    with np.load(io.BytesIO(state), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
