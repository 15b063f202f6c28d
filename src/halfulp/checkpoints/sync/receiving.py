"""Apply changes to a copy, each completely or not at all, and in order.

A change records the position that it applies to and the position that it leads to. A position is the number
of a sync and a digest over everything stored at that time: for the first sync, over the checksums of every
tensor; for each later one, over the previous position and the checksums of the changed tensors. So two
positions are equal only if their whole histories are, and a :class:`Receiver`, which keeps the position of a
copy, detects a missing, repeated or late change and one of another run without reading the tensors.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from halfulp import canonical, tensors
from halfulp.errors import CorruptionError, UsageError
from halfulp.text import shown

if TYPE_CHECKING:
    from halfulp.checkpoints.sync.changes import Change, Part
    from halfulp.checkpoints.sync.shards import Box, Model

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION = re.compile(r"([1-9][0-9]{0,15}):[0-9a-f]{64}")


def position(number: int, before: str | None, checksums: Mapping[str, int]) -> str:
    """Compute the position of a sync from the previous position and the checksums of the changed tensors.

    The first sync has no previous position, and takes the checksums of all tensors.

    >>> position(1, None, {"w": 7})[:10]
    '1:966153aa'
    """
    return f"{number}:{canonical.digest({'number': number, 'before': before, 'crc32': dict(checksums)})}"


def number_of(place: Any) -> int | None:
    """Return the number of the sync that a position names; None if it is not a position."""
    match = _POSITION.fullmatch(place) if isinstance(place, str) else None
    return None if match is None else int(match[1])


class Receiver:
    """A copy that follows a trainer's :class:`~halfulp.Sync` by applying each change once and in order.

    Args:
        held: The copy: a model, or tensors by name. Or a function that applies a change to a copy of its own,
            such as one that hands ``change.checkpoint_patches()`` to a sampler. If it raises, the content of
            the copy is unknown, and the receiver expects a full change.
        position: The position of the copy: ``sync.position`` when the copy was made, or the ``position`` of a
            receiver that was saved with it. None if unknown; then the first change must be a full one.

    Raises:
        UsageError: If ``held`` is no copy, or ``position`` is not a position.

    >>> import halfulp as hu
    >>> weights = {"w": torch.zeros(4)}
    >>> sync, copy = hu.Sync(weights), {"w": torch.zeros(4)}
    >>> receiver = hu.Receiver(copy, position=sync.position)
    >>> weights["w"][2] = 1.0
    >>> receiver.apply(sync.take())
    >>> copy["w"], receiver.position == sync.position
    (tensor([0., 0., 1., 0.]), True)
    """

    def __init__(self, held: Model | Callable[[Change], object], position: str | None = None) -> None:
        if position is not None and number_of(position) is None:
            raise UsageError(
                f"position= is what Sync.position or Receiver.position gives, not {shown(str(position))!r}."
            )
        if not (isinstance(held, Mapping) or callable(held)):  # a module can be called too
            raise UsageError(
                "a receiver takes a model, tensors by name, or a function that applies a change, not "
                f"{type(held).__name__}."
            )
        self.held = held
        self.position = position
        """The position of the copy. Save it with the copy, and pass it to the receiver that continues."""

    def apply(self, change: Change, *, verify: bool = False) -> None:
        """Apply the next change to the copy. A full change is accepted at any position.

        Args:
            change: The result of ``Sync.take`` or ``Sync.full``.
            verify: Also compare the checksums of all tensors before anything is written.

        Raises:
            UsageError: If an earlier change is missing, if this one was already applied or is from another
                ``Sync``, or if it does not fit the copy. The copy is unchanged.
            CorruptionError: If ``verify`` finds other values. The copy is unchanged.
        """
        self._check(change)
        if isinstance(self.held, (torch.nn.Module, Mapping)):
            change.apply(self.held, verify=verify)
        elif verify:
            raise UsageError(
                "verify=True reads the copy, and this receiver only has a function that writes it."
            )
        else:
            self.position = None  # until it has all of it
            self.held(change)
        self.position = change.target

    def _check(self, change: Change) -> None:
        if not hasattr(change, "target"):
            raise UsageError(
                f"apply() takes a change, not {type(change).__name__}; Change.load reads one from a file."
            )
        here = number_of(self.position)
        if change.base is None or change.base == self.position:
            return
        if here is None:
            raise UsageError(
                f"this copy has no position yet, and the change leads from sync {change.since} to "
                f"{change.number}: apply Sync.full() first, or give Receiver(position=sync.position)."
            )
        if change.since > here:
            why = f"what changed from sync {here} to {change.since} is missing: apply that first"
        elif change.number <= here:
            why = "it is stale, or was applied already: go on with the change that leads on from there"
        else:
            why = "it is of another Sync (another run, or one that began again)"
        raise UsageError(
            f"the change leads from sync {change.since} to {change.number}, but this copy is at sync {here}; "
            f"{why}, or begin again with Sync.full(). Nothing was changed."
        )


# ---- writing ----------------------------------------------------------------------------------------


def check_fit(parts: Mapping[str, Part], there: Mapping[str, torch.Tensor]) -> None:
    """Refuse a part whose tensor is missing, or has another type or shape."""
    for name, part in parts.items():
        if name not in there:
            raise UsageError(f"there is no {shown(name)!r} to apply a change to.")
        x = there[name]
        if x.dtype != part.dtype or tuple(x.shape) != part.shape:
            raise UsageError(
                f"{shown(name)!r} is {x.dtype} of {tuple(x.shape)} here, but the change is for "
                f"{part.dtype} of {part.shape}."
            )
        if not x.is_contiguous():
            raise UsageError(f"{shown(name)!r} is not contiguous: apply the change to a contiguous copy.")


def check_result(change: Change, parts: Mapping[str, Part], there: Mapping[str, torch.Tensor]) -> None:
    """Refuse a change after which any tensor of the copy would differ from the trainer's."""
    expected: dict[str, list[tuple[Box | None, int]]] = {
        n: [(None, crc)] for n, crc in change.checksums.items()
    }
    expected |= {name: list(chunks) for name, chunks in change.boxes.items()}
    first = {other: name for name, others in change.tied.items() for other in others}
    for name, part in parts.items():
        sharded = part.crc32 is None
        expected[name] = expected[first.get(name, name)] if sharded else [(None, part.crc32 or 0)]
    for name, sums in expected.items():
        if name not in there:
            continue
        bits = as_bits(there[name])
        if name in parts:
            bits = bits.clone()
            _put(bits, *_places(parts[name], bits))
        chunks = ((bits if box is None else bits.reshape(box.shape)[box.slices], crc) for box, crc in sums)
        if any(checksum(piece) != crc for piece, crc in chunks):
            raise CorruptionError(
                f"{shown(name)!r} would not be what the trainer holds after sync {change.number}: this copy "
                f"was not at sync {change.since}. Nothing was changed. Begin again with Sync.full()."
            )


def write(parts: Mapping[str, Part], there: Mapping[str, torch.Tensor]) -> None:
    """Write all parts or none: the old values are kept until the last part is written."""
    undo: list[Callable[[], None]] = []
    try:
        for name, part in parts.items():
            bits = as_bits(there[name])
            at, new = _places(part, bits)
            old = bits[at].clone()
            undo.append(partial(_put, bits, at, old))
            _put(bits, at, new)
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise


def _places(part: Part, bits: torch.Tensor) -> tuple[Any, torch.Tensor]:
    at = slice(None) if part.form == "all" else part.indices.to(bits.device)
    return at, part.bits.to(bits.device)


def _put(bits: torch.Tensor, at: Any, values: torch.Tensor) -> None:
    bits[at] = values


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as flat integers; a view if it is contiguous."""
    flat = x.detach().contiguous().reshape(-1)
    return flat.view(BITS[flat.element_size()])


def checksum(bits: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensors.raw(bits))
