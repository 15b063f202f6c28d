"""Convert a change to the formats that samplers accept: vLLM's sparse and checkpoint patches.

Both give flat positions in a tensor and their absolute values. Applying a patch twice is harmless but missing
one is not, so keep a :class:`~halfulp.Receiver` beside it. Patches are tuples with the fields that vLLM
reads, so they can be passed to it as they are; vLLM is not needed to make them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from halfulp.errors import UsageError
from halfulp.text import shown

if TYPE_CHECKING:
    from halfulp.checkpoints.sync.changes import Change, Part

MOST_INT32 = 2**31
Names = Mapping[str, str | tuple[str, int]]


class SparseWeightPatch(NamedTuple):
    """The new values of one tensor, by its name in the running sampler.

    Args:
        name: The name.
        indices: Ascending int32 positions in the flat tensor.
        values: The new values at these positions.

    >>> patch = SparseWeightPatch("layer.weight", torch.tensor([1], dtype=torch.int32), torch.ones(1))
    >>> weight = torch.zeros(2, 2)
    >>> weight.view(-1)[patch.indices] = patch.values
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor


class CheckpointWeightPatch(NamedTuple):
    """The new values of one tensor, by its name in a checkpoint, for the sampler's loader.

    Args:
        name: The name.
        shape: The shape of the whole tensor.
        dtype: The type of the tensor.
        values: The new values.
        indices: Their ascending positions, int32 or, in tensors of 2^31 values or more, int64; None if
            ``values`` is the whole tensor.

    >>> CheckpointWeightPatch("layer.weight", (2,), torch.bfloat16, torch.ones(2)).indices is None
    True
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape, under the name that newer transports of vLLM use."""
        return self.shape


def sparse_patches(change: Change, names: Names | None = None) -> list[SparseWeightPatch]:
    """Return a change by the names and places of the running sampler; see :meth:`Change.sparse_patches`."""
    out = []
    for name, part in change.parts.items():
        given = (names or {}).get(name, name)
        there, offset = (given, 0) if isinstance(given, str) else given
        if part.numel + offset > MOST_INT32:
            raise UsageError(
                f"{shown(name)!r} has {part.numel:,} values, and this format counts places in int32: use "
                "checkpoint_patches, or cut the tensor."
            )
        out.append(SparseWeightPatch(there, (part.indices + offset).to(torch.int32), part.values))
    return out


def checkpoint_patches(change: Change, names: Mapping[str, str] | None = None) -> list[CheckpointWeightPatch]:
    """Return a change by the names of a checkpoint; see :meth:`Change.checkpoint_patches`."""
    dense = change.since == 0 and all(part.form == "all" for part in change.parts.values())
    out = []
    for name, part in change.parts.items():
        there = (names or {}).get(name, name)
        if dense:
            out.append(CheckpointWeightPatch(there, part.shape, part.dtype, part.values))
            continue
        _check_sparse(name, part)
        wide = math.prod(part.shape) > MOST_INT32
        indices = part.indices.to(torch.int64 if wide else torch.int32)
        out.append(CheckpointWeightPatch(there, part.shape, part.dtype, part.values, indices))
    return out


def _check_sparse(name: str, part: Part) -> None:
    """Refuse what the receiving side cannot take sparsely: it marks places that stay with NaN."""
    if not part.dtype.is_floating_point:
        raise UsageError(
            f"{shown(name)!r} is {part.dtype}, and sparse checkpoint patches are of floats: leave it out of "
            "the Sync and send it whole, or use sparse_patches."
        )
    values = part.values
    if bool(torch.isnan(values.float()).any()):
        raise UsageError(
            f"{shown(name)!r} has new values that are NaN, which mark places that stay in sparse checkpoint "
            "patches: a training with NaN weights should not be sampled from."
        )
