"""Define ``Change``, the difference between two syncs: save, load, join from shards and apply it.

The form in which positions are encoded does not affect the content of a change. A rank of a distributed
trainer has the change of its shards, with positions in the whole tensors; :func:`join` combines the changes
of all ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp import canonical, files, tensors
from halfulp.checkpoints.sync import patches, places, receiving
from halfulp.checkpoints.sync.places import Form
from halfulp.checkpoints.sync.receiving import BITS, number_of
from halfulp.checkpoints.sync.shards import Box, Model, tiled, whole_tensors
from halfulp.documents import Fields, parsed
from halfulp.errors import CorruptionError, UsageError
from halfulp.text import shown

FORMAT = "halfulp.change"
VERSIONS = ("1", "2")
"""Readable format versions; 2 adds gaps and boxes."""


@dataclass(frozen=True)
class Part:
    """The changed values of one tensor.

    Args:
        dtype: The type of the tensor.
        shape: The shape of the whole tensor.
        form: The encoding of the positions: ``gaps``, ``mask`` or ``all``.
        where: Gaps, or the bytes of a mask (lowest bit first); prefer :attr:`indices` and :attr:`mask`.
        bits: The new values at these positions, in order, as integers of their size; see :attr:`values`.
        crc32: The checksum of the whole tensor's bytes after the change; None if the tensor is sharded
            (see ``Change.boxes``).
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form
    where: torch.Tensor
    bits: torch.Tensor
    crc32: int | None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def changed(self) -> int:
        """Return the number of elements that changed."""
        return self.bits.numel()

    @property
    def payload_bytes(self) -> int:
        """Return the bytes that are sent for this part."""
        return sum(t.numel() * t.element_size() for t in (self.where, self.bits))

    @property
    def values(self) -> torch.Tensor:
        """The new values, in the dtype in which they are stored."""
        return self.bits.view(self.dtype)

    @property
    def indices(self) -> torch.Tensor:
        """The flat indices of the changed values, in order."""
        return torch.from_numpy(places.decoded(self.form, self.where.numpy(), self.numel))

    @property
    def mask(self) -> torch.Tensor:
        """A bool tensor of the tensor's shape that marks the changed values."""
        out = torch.zeros(self.numel, dtype=torch.bool, device="cpu")
        out[self.indices] = True
        return out.reshape(self.shape)


@dataclass(frozen=True)
class Change:
    """The difference between two syncs, without the tensors that did not change.

    Changes are made by ``Sync.take`` and ``Sync.full``, :func:`~halfulp.checkpoints.join` and :meth:`load`.
    """

    since: int
    """The number of the sync that the change builds on; 0 for a full change."""
    number: int
    numel: int
    """The number of values in all tensors."""
    parts: dict[str, Part]
    tied: dict[str, list[str]]
    """Other names of the tensors in the change, because a copy may hold tied weights separately."""
    base: str | None
    """The position that the change applies to; None for a full change, which applies to any."""
    target: str
    """The position that the change leads to."""
    checksums: dict[str, int]
    """The CRC-32 of every whole tensor after the change, including those that did not change."""
    boxes: dict[str, list[tuple[Box, int]]] = field(default_factory=dict)
    """The pieces of sharded tensors, with the CRC-32 of each."""

    @property
    def changed(self) -> int:
        """Return the number of elements that changed."""
        return sum(p.changed for p in self.parts.values())

    @property
    def density(self) -> float:
        """The share of all stored values that changed."""
        return self.changed / self.numel if self.numel else 0.0

    @property
    def payload_bytes(self) -> int:
        """Return the bytes that are sent, without the header."""
        return sum(p.payload_bytes for p in self.parts.values())

    def sparse_patches(self, names: patches.Names | None = None) -> list[patches.SparseWeightPatch]:
        """Return the change as vLLM's ``SparseWeightPatch``, with runtime names and flat int32 indices.

        Args:
            names: The sampler's name for each of our names. For tensors that the sampler holds packed (q, k
                and v one below the other), a pair of that name and the offset of our tensor in it, in values.
                Tensors that are not listed keep their names.

        Returns:
            One patch per changed tensor.

        Raises:
            UsageError: If a tensor is too large for int32.
        """
        return patches.sparse_patches(self, names)

    def checkpoint_patches(
        self, names: Mapping[str, str] | None = None
    ) -> list[patches.CheckpointWeightPatch]:
        """Return the change as vLLM's ``CheckpointWeightPatch``, with the names of a checkpoint.

        The patches of ``Sync.full()`` are dense and have no indices. All patches of a list are of one kind,
        as vLLM expects.

        Args:
            names: The checkpoint's name for each of our names. Tensors that are not listed keep their names.

        Returns:
            One patch per changed tensor.

        Raises:
            UsageError: If a part cannot be sent sparsely because it has no floating dtype or contains NaN.
        """
        return patches.checkpoint_patches(self, names)

    def save(self, path: str | Path) -> None:
        """Save the change atomically, with a digest.

        Args:
            path: The file to write.
        """
        files.put(files.path_of(path, "a change"), self._content())

    def to_bytes(self) -> bytes:
        """Return the content of the file that :meth:`save` writes, to send it."""
        return b"".join(self._content())

    def _content(self) -> Any:
        new = bool(self.boxes) or any(p.form == "gaps" or p.crc32 is None for p in self.parts.values())
        document: dict[str, Any] = {
            "since": self.since, "number": self.number, "numel": self.numel,
            "parts": [
                {"name": n, "dtype": tensors.NAMES[p.dtype], "shape": list(p.shape), "form": p.form}
                | ({} if p.crc32 is None else {"crc32": p.crc32})
                for n, p in self.parts.items()
            ],
            **({"tied": self.tied} if self.tied else {}),
            "base": self.base, "target": self.target, "checksums": self.checksums,
        }  # fmt: skip
        if self.boxes:
            document["boxes"] = [
                {"name": name, "shape": box.shape, "start": box.start, "size": box.size, "crc32": crc}
                for name, sums in self.boxes.items()
                for box, crc in sums
            ]
        arrays = {f"{i}.where": p.where for i, p in enumerate(self.parts.values())}
        arrays |= {f"{i}.bits": p.bits for i, p in enumerate(self.parts.values())}
        return tensors.content(arrays, {FORMAT: "2" if new else "1", "change": json.dumps(document)})

    @classmethod
    def load(cls, path: str | Path) -> Change:
        """Load a change, and refuse a damaged file.

        Args:
            path: A file that :meth:`save` wrote.

        Returns:
            The change.

        Raises:
            CorruptionError: If the file is not a change, or is damaged.
            TamperingError: If its content does not match its digest.
        """
        return cls._read(*tensors.read(files.path_of(path, "a change"), follow=True), str(path))

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "these bytes") -> Change:
        """Read the content that :meth:`to_bytes` returned.

        Args:
            content: The bytes.
            where: The name of their source, for errors.

        Raises:
            CorruptionError: If they are not a change, or are damaged.
            TamperingError: If the content does not match its digest.
        """
        return cls._read(*tensors.read_stream(BytesIO(content), len(content), Path(where)), where)

    @classmethod
    def _read(cls, arrays: dict[str, torch.Tensor], metadata: Mapping[str, str], where: str) -> Change:
        if metadata.get(FORMAT) not in VERSIONS or tensors.DIGEST not in metadata:
            raise CorruptionError(f"{where} is not a change that halfulp wrote (version 1 or 2).")
        fields = Fields(parsed(metadata.get("change", ""), where, "a change"), where)
        parts = _read_parts(fields, arrays, where)
        since, number, numel = fields.whole("since"), fields.whole("number", 1), fields.whole("numel")
        names = fields.within("tied") if "tied" in fields.values else None
        tied = {} if names is None else {name: names.texts(name) for name in parts if name in names.values}
        base = fields.take(
            "base",
            f"the position of sync {since}",
            lambda v: v is None if not since else number_of(v) == since,
        )
        target = fields.take("target", f"the position of sync {number}", lambda v: number_of(v) == number)
        sums = fields.within("checksums")
        checksums = {name: sums.whole(name, 0, 2**32 - 1) for name in sums.values}
        boxes = _read_boxes(fields, parts, where)
        return cls(since, number, numel, parts, tied, base, target, checksums, boxes)

    @torch.no_grad()
    def apply(self, held: Model, *, verify: bool = False) -> None:
        """Apply the change to a model or to tensors by name, completely or not at all.

        The copy must have the same names, types and shapes. This method does not check the order of changes;
        use a :class:`~halfulp.Receiver` for that.

        Args:
            held: The copy.
            verify: Before writing, compare the checksums that all tensors would have with the trainer's. This
                reads every tensor, and detects a missing or stale change.

        Raises:
            UsageError: If the change does not fit. The copy is unchanged.
            CorruptionError: If ``verify`` finds other values. The copy is unchanged.
        """
        there = whole_tensors(held)
        parts = dict(self.parts)
        for name, others in self.tied.items():
            parts |= {other: parts[name] for other in others if other in there}
        receiving.check_fit(parts, there)
        if verify:
            receiving.check_result(self, parts, there)
        receiving.write(parts, there)


def _read_parts(document: Fields, arrays: Mapping[str, torch.Tensor], where: str) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for i, fields in enumerate(document.each("parts")):
        sharded = "crc32" not in fields.values and "boxes" in document.values
        part = Part(
            tensors.DTYPES[
                fields.take("dtype", "a dtype", lambda v: isinstance(v, str) and v in tensors.DTYPES)
            ],
            tuple(fields.wholes("shape", tensors.MOST_DIMENSIONS)),
            fields.take("form", "gaps, mask or all", lambda v: v in ("gaps", "mask", "all")),
            arrays.get(f"{i}.where", torch.empty(0, device="cpu")),
            arrays.get(f"{i}.bits", torch.empty(0, device="cpu")),
            None if sharded else fields.whole("crc32", 0, 2**32 - 1),
        )
        if (wrong := _unfit(part)) is not None:
            raise CorruptionError(f"{where}: {shown(fields.text('name'))!r} {wrong}.")
        parts[fields.text("name")] = part
    return parts


def _unfit(part: Part) -> str | None:
    """Return what is wrong with a part that was read, or None."""
    if part.bits.dtype != BITS[part.dtype.itemsize] or part.bits.dim() != 1:
        return f"has {part.bits.dtype} for the bits of {part.dtype}"
    return places.why_unfit(part.form, part.where.numpy(), part.numel, part.changed)


def _read_boxes(document: Fields, parts: Mapping[str, Part], where: str) -> dict[str, list[tuple[Box, int]]]:
    boxes: dict[str, list[tuple[Box, int]]] = {}
    for fields in document.each("boxes") if "boxes" in document.values else ():
        name = fields.text("name")
        shape, start, size = (
            tuple(fields.wholes(key, tensors.MOST_DIMENSIONS)) for key in ("shape", "start", "size")
        )
        fits = len(shape) == len(start) == len(size) and all(
            a + n <= s for a, n, s in zip(start, size, shape, strict=False)
        )
        if not fits or (name in parts and parts[name].shape != shape):
            raise CorruptionError(f"{where}: {shown(name)!r} has a piece that is not in the tensor.")
        boxes.setdefault(name, []).append((Box(shape, start, size), fields.whole("crc32", 0, 2**32 - 1)))
    if missing := [name for name, part in parts.items() if part.crc32 is None and name not in boxes]:
        raise CorruptionError(f"{where}: {shown(missing[0])!r} has no checksum.")
    return boxes


# ---- shards -----------------------------------------------------------------------------------------


def join_positions(positions: Sequence[str]) -> str:
    """Return the position of a whole model, given the positions of all ranks.

    Args:
        positions: ``Sync.position`` of every rank, in any order.

    Returns:
        The position, for a :class:`~halfulp.Receiver`.

    Raises:
        UsageError: If they are not positions of the same sync.

    >>> from halfulp import Sync
    >>> ranks = [Sync(torch.nn.Linear(4, 4)).position for _ in range(2)]
    >>> join_positions(ranks) == join_positions(ranks[::-1])
    True
    """
    given: Any = positions  # whatever a caller gave
    if not isinstance(given, Iterable):
        raise UsageError(f"join_positions() takes those of all ranks, in a list, not {given!r:.60}.")
    numbers = {number_of(p) for p in positions}
    if len(numbers) != 1 or None in numbers:
        raise UsageError(f"these are not the positions of one sync on every rank: {list(positions)}.")
    return f"{numbers.pop()}:{canonical.digest({'ranks': sorted(positions)})}"


def join(changes: Sequence[Change]) -> Change:
    """Join the changes of all ranks into one change of the whole model.

    Args:
        changes: The change of every rank, in any order.

    Returns:
        The joined change.

    Raises:
        UsageError: If they are not of the same sync, or if a shard of a tensor is missing or given twice.

    >>> from halfulp import Sync
    >>> whole = Sync(torch.nn.Linear(4, 4)).full()
    >>> join([whole]).numel
    20
    """
    given: Any = changes  # whatever a caller gave
    if not isinstance(given, Iterable):
        raise UsageError(f"join() takes the changes of all ranks, in a list, not {type(given).__name__}.")
    if wrong := [type(c).__name__ for c in given if not isinstance(c, Change)]:
        raise UsageError(f"join() takes the changes of all ranks, not {wrong[0]}.")
    syncs = sorted({(c.since, c.number) for c in changes})
    if len(syncs) != 1:
        raise UsageError(
            f"the changes lead from sync to sync {syncs}: give those of one sync, of every rank."
        )
    boxes: dict[str, list[tuple[Box, int]]] = {}
    checksums: dict[str, int] = {}
    parts: dict[str, list[Part]] = {}
    tied: dict[str, list[str]] = {}
    for change in changes:
        if twice := change.checksums.keys() & checksums.keys():
            raise UsageError(
                f"{shown(min(twice))!r} is whole in several changes: give that of every rank once."
            )
        checksums |= change.checksums
        tied |= change.tied
        for name, some in change.boxes.items():
            boxes.setdefault(name, []).extend(some)
        for name, part in change.parts.items():
            parts.setdefault(name, []).append(part)
    for name, some in boxes.items():
        tiled(name, [box for box, _ in some])
    (since, number), bases = syncs[0], [c.base for c in changes if c.base is not None]
    if len(bases) not in (0, len(changes)):
        raise UsageError("some of these changes are everything and some are not.")
    return Change(
        since, number, sum(c.numel for c in changes),
        {name: _joined(name, some) for name, some in parts.items()}, tied,
        join_positions(bases) if bases else None, join_positions([c.target for c in changes]),
        checksums, boxes,
    )  # fmt: skip


def _joined(name: str, some: list[Part]) -> Part:
    if len(some) == 1 and some[0].crc32 is not None:
        return some[0]
    if len({(p.dtype, p.shape) for p in some}) > 1:
        raise UsageError(f"the shards of {shown(name)!r} are of several dtypes or shapes.")
    at, order = torch.cat([p.indices for p in some]).sort()
    form, where = places.smallest(at.numpy().astype(np.int64), some[0].numel)
    bits = torch.cat([p.bits for p in some])[order]
    return replace(some[0], form=form, where=torch.from_numpy(where), bits=bits, crc32=None)
