"""``Sync``: which stored values changed since the last sync, exactly, to be sent and applied elsewhere.

Reinforcement learning trains one copy of a model and samples from another, and at small learning rates most
weights that are stored in bf16 or fp8 do not change between two syncs. Which ones do cannot be told from the
optimizer's state (predictions miss most of them); it can be told from the stored bits. ``Sync`` keeps those
of the last sync and compares: a value changed if and only if its bits did, so a zero that changed its sign
did.

    trainer:  change = sync.take();  change.save("17.safetensors")
    sampler:  hu.Change.load("17.safetensors").apply(model)

With ``grid=``, what is stored elsewhere are the codes of a grid, and the scales of its blocks (``nvfp4``), to
which the trainer's weights are rounded. A change names the places of a tensor
that changed as indices or as a bit mask, whichever takes fewer bytes; what it says is the same.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp import files, tensors
from halfulp.documents import Fields, parsed
from halfulp.errors import CorruptionError, UsageError
from halfulp.grids import Grid
from halfulp.grids import grid as named
from halfulp.stored import counting
from halfulp.text import shown

Array = npt.NDArray[Any]
Form = Literal["indices", "mask", "all"]
Held = torch.nn.Module | Mapping[str, torch.Tensor]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FORMAT = "halfulp.change"
SCALES = ".scales"
"""How the name of a tensor's scales ends, where a grid has them."""


@dataclass(frozen=True)
class Part:
    """What changed in one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form
    where: torch.Tensor
    """Indices (int32, or int64 in large tensors), or the bytes of a mask, lowest bit first; else empty."""
    bits: torch.Tensor
    """The new values at these places, in order, as integers of their size."""
    crc32: int
    """Of the whole tensor's bytes after the change."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def changed(self) -> int:
        return self.bits.numel()

    @property
    def payload_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.where, self.bits))

    @property
    def values(self) -> torch.Tensor:
        """The new values, in the dtype in which they are stored."""
        return self.bits.view(self.dtype)

    @property
    def indices(self) -> torch.Tensor:
        """The flat indices of what changed, in order."""
        if self.form == "indices":
            return self.where.long()
        if self.form == "all":
            return torch.arange(self.numel, device="cpu")
        out = np.empty(self.changed, dtype=np.int64)
        counting.places(self.where.numpy(), 0, out)
        return torch.from_numpy(out)

    @property
    def mask(self) -> torch.Tensor:
        """What changed, as a bool tensor of the tensor's shape."""
        out = torch.zeros(self.numel, dtype=torch.bool, device="cpu")
        out[self.indices] = True
        return out.reshape(self.shape)


@dataclass(frozen=True)
class Change:
    """What changed between two syncs. Tensors in which nothing did are not in it."""

    since: int
    """The sync that it builds on; 0: none, this is everything."""
    number: int
    numel: int
    """Values in all tensors."""
    parts: dict[str, Part]
    tied: dict[str, list[str]] = field(default_factory=dict)
    """Other names of tensors that are in it: a copy may hold tied weights apart."""

    @property
    def changed(self) -> int:
        return sum(p.changed for p in self.parts.values())

    @property
    def density(self) -> float:
        """The share of all stored values that changed."""
        return self.changed / self.numel

    @property
    def payload_bytes(self) -> int:
        return sum(p.payload_bytes for p in self.parts.values())

    def save(self, path: str | Path) -> None:
        """Write it, with a digest; the file appears whole."""
        files.put(Path(path), self._content())

    def to_bytes(self) -> bytes:
        """The content of such a file, to be sent."""
        return b"".join(self._content())

    def _content(self) -> Any:
        told = {
            "since": self.since,
            "number": self.number,
            "numel": self.numel,
            "parts": [
                {"name": n, "dtype": tensors.NAMES[p.dtype], "shape": list(p.shape), "form": p.form,
                 "crc32": p.crc32}
                for n, p in self.parts.items()
            ],
        } | ({"tied": self.tied} if self.tied else {})  # fmt: skip
        held = {f"{i}.where": p.where for i, p in enumerate(self.parts.values())}
        held |= {f"{i}.bits": p.bits for i, p in enumerate(self.parts.values())}
        return tensors.content(held, {FORMAT: "1", "change": json.dumps(told)})

    @classmethod
    def load(cls, path: str | Path) -> Change:
        """Read one; a file that is not what was written is refused."""
        return cls._read(*tensors.read(Path(path), follow=True), str(path))

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "these bytes") -> Change:
        """:meth:`load` of what :meth:`to_bytes` gave."""
        from io import BytesIO

        return cls._read(*tensors.read_stream(BytesIO(content), len(content), Path(where)), where)

    @classmethod
    def _read(cls, held: dict[str, torch.Tensor], metadata: Mapping[str, str], where: str) -> Change:
        if metadata.get(FORMAT) != "1" or tensors.DIGEST not in metadata:
            raise CorruptionError(f"{where} is not a change that halfulp wrote (version 1).")
        told = Fields(parsed(metadata.get("change", ""), where, "a change"), where)
        parts: dict[str, Part] = {}
        for i, fields in enumerate(told.each("parts")):
            dtype = tensors.DTYPES[
                fields.take("dtype", "a dtype", lambda v: isinstance(v, str) and v in tensors.DTYPES)
            ]
            part = Part(
                dtype,
                tuple(fields.wholes("shape", tensors.MOST_DIMENSIONS)),
                fields.take("form", "indices, mask or all", lambda v: v in ("indices", "mask", "all")),
                held.get(f"{i}.where", torch.empty(0, device="cpu")),
                held.get(f"{i}.bits", torch.empty(0, device="cpu")),
                fields.whole("crc32", 0, 2**32 - 1),
            )
            if (wrong := _unfit(part)) is not None:
                raise CorruptionError(f"{where}: {shown(fields.text('name'))!r} {wrong}.")
            parts[fields.text("name")] = part
        names = told.within("tied") if "tied" in told.values else None
        tied = {} if names is None else {name: names.texts(name) for name in parts if name in names.values}
        return cls(told.whole("since"), told.whole("number", 1), told.whole("numel", 1), parts, tied)

    @torch.no_grad()
    def apply(self, held: Held, *, verify: bool = False) -> None:
        """Write it into a model or into tensors of the same names, types and shapes.

        Nothing is written unless everything fits. ``verify``: look at every byte afterwards, and raise if a
        tensor is not the trainer's, as when a change was left out.
        """
        there = _named(held)
        parts = dict(self.parts)
        for name, others in self.tied.items():
            parts |= {other: parts[name] for other in others if other in there}
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
        for name, part in parts.items():
            bits = _bits(there[name])
            if part.form == "all":
                bits.copy_(part.bits)
            else:
                bits[part.indices.to(bits.device)] = part.bits.to(bits.device)
            if verify and zlib.crc32(tensors.raw(bits)) != part.crc32:
                raise CorruptionError(
                    f"{shown(name)!r} is not what the trainer holds after sync {self.number}: this copy was "
                    f"not at sync {self.since}. Begin again with a full one (Sync.full)."
                )


class Sync:
    """Follows the stored values of a model, or of tensors by name.

    ``grid``: compare the codes of a grid (one byte a weight; the scales of its blocks apart), to which float
    tensors of two or more dimensions are rounded; None: compare the tensors as they are. It keeps a copy of
    what was taken last: as many bytes as what is stored.

    >>> weights = {"w": torch.ones(4, dtype=torch.bfloat16)}
    >>> sync = Sync(weights)
    >>> weights["w"][2] += 0.01
    >>> change = sync.take()
    >>> change.parts["w"].indices, change.parts["w"].values
    (tensor([2]), tensor([1.0078], dtype=torch.bfloat16))
    >>> sync.density()
    0.0
    """

    def __init__(self, held: Held, grid: str | Grid | torch.dtype | None = None) -> None:
        self.held = held
        self.grid = None if grid is None else named(grid)
        if self.grid is not None and self.grid.bits > 16:
            raise UsageError(f"grid {self.grid.name} has {self.grid.bits} bits; codes have at most 16.")
        self.number = 1
        """How many syncs there were; the first is what the model held at the beginning."""
        self._last = {name: _bits(x).clone() for name, x in self.stored().items()}
        if not self._last:
            raise UsageError("nothing to follow: there is no tensor with values.")

    def stored(self) -> dict[str, torch.Tensor]:
        """What is stored now: the tensors themselves, or their codes and scales on the grid."""
        found: dict[str, torch.Tensor] = {}
        held = _named(self.held)
        for name, x in held.items():
            if self.grid is None or not x.is_floating_point() or x.dim() < 2:
                found[name] = x
                continue
            scales = self.grid.scales(x) if self.grid.scaling is not None else None
            codes = self.grid.encode(x, scale=scales)
            found[name] = codes if codes.dtype == torch.uint8 else codes.to(torch.int16)
            if scales is None:
                continue
            if name + SCALES in held:
                raise UsageError(
                    f"{shown(name + SCALES)!r} is a tensor of its own, and what the scales of "
                    f"{shown(name)!r} on {self.grid.name} are called: give it another name."
                )
            found[name + SCALES] = scales.float()
        return found

    def _now(self) -> dict[str, torch.Tensor]:
        """What is stored now, under the names of the last sync."""
        now = self.stored()
        told = [f"{shown(n)!r} is new" for n in now if n not in self._last]
        told += [f"{shown(n)!r} is missing" for n in self._last if n not in now]
        if told:
            raise UsageError(
                f"the tensors are not those of the last sync: {', '.join(told[:5])} ({len(told)} in all). "
                "Begin again with another Sync."
            )
        return now

    def density(self) -> float:
        """The share of stored values that differ from those of the last sync, which stays the last one."""
        now = self._now()
        changed = sum(_differing(self._last[n], _bits(x))[1] for n, x in now.items())
        return changed / sum(x.numel() for x in now.values())

    def take(self) -> Change:
        """What changed since the last sync; this is the last one then."""
        parts: dict[str, Part] = {}
        taken: dict[str, torch.Tensor] = {}
        now = self._now()
        for name, x in now.items():
            bits = _bits(x)
            mask, changed = _differing(self._last[name], bits)
            if changed:
                parts[name] = _part(x, bits, mask, changed)
                taken[name] = bits
        for name, bits in taken.items():  # not before all are compared, or what was taken could be lost
            self._last[name].copy_(bits)
        self.number += 1
        return self._change(self.number - 1, now, parts)

    def full(self) -> Change:
        """Everything as of the last sync, for a copy that begins."""
        now = self._now()
        parts = {}
        for name, x in now.items():
            last = self._last[name].cpu()
            crc = zlib.crc32(tensors.raw(last))
            parts[name] = Part(
                x.dtype,
                tuple(x.shape),
                "all",
                torch.empty(0, dtype=torch.uint8, device="cpu"),
                last.clone(),
                crc,
            )
        return self._change(0, now, parts)

    def _change(self, since: int, now: dict[str, torch.Tensor], parts: dict[str, Part]) -> Change:
        ends = ("", SCALES)
        tied = {
            name + end: [other + end for other in others]
            for name, others in _tied(self.held).items()
            for end in ends
            if name + end in parts
        }
        return Change(since, self.number, sum(x.numel() for x in now.values()), parts, tied)


def _named(held: Held) -> dict[str, torch.Tensor]:
    """The tensors that have values, by name; of tied ones the first name."""
    if isinstance(held, torch.nn.Module):
        pairs = [(_plain(n), x) for n, x in (*held.named_parameters(), *held.named_buffers())]
    else:
        pairs = list(held.items())
    found = {name: x.detach() for name, x in pairs if x.numel()}
    for name, x in found.items():
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided:
            raise UsageError(
                f"{shown(name)!r} is a {type(x).__name__}: give plain tensors, such as the local shards of a "
                "distributed one (x.to_local()), under names of their own."
            )
        if x.dtype not in tensors.NAMES:
            raise UsageError(f"{shown(name)!r} is {x.dtype}, which safetensors cannot hold.")
    return found


def _plain(name: str) -> str:
    """A name without the part that torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def _tied(held: Held) -> dict[str, list[str]]:
    """The other names of tensors that a module has under several, by the first."""
    if not isinstance(held, torch.nn.Module):
        return {}
    names: dict[torch.Tensor, list[str]] = {}
    for pairs in (held.named_parameters(remove_duplicate=False), held.named_buffers(remove_duplicate=False)):
        for name, x in pairs:
            names.setdefault(x, []).append(_plain(name))
    return {first: others for first, *others in names.values() if others}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """A tensor as flat integers; a view where it is contiguous."""
    flat = x.detach().contiguous().reshape(-1)
    return flat.view(BITS[flat.element_size()])


def _differing(old: torch.Tensor, new: torch.Tensor) -> tuple[Array, int]:
    """Where two differ, as the bytes of a mask on the CPU, and in how many places."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise UsageError(
            f"a tensor was {old.dtype} with {old.numel():,} values at the last sync and is {new.dtype} with "
            f"{new.numel():,} now: begin again with another Sync."
        )
    if new.device.type == "cpu":
        mask = np.empty((new.numel() + 7) // 8, dtype=np.uint8)
        return mask, int(counting.differing(old.numpy(), new.numpy(), mask))
    return _differing_elsewhere(old, new)


def _differing_elsewhere(old: torch.Tensor, new: torch.Tensor) -> tuple[Array, int]:
    """The same on a device."""
    differ = (old != new).cpu().numpy()
    return np.packbits(differ, bitorder="little"), int(np.count_nonzero(differ))


def _part(x: torch.Tensor, bits: torch.Tensor, mask: Array, changed: int) -> Part:
    """The form that takes the fewest bytes."""
    wide = x.numel() >= 2**31
    places = changed * (8 if wide else 4)
    out = np.empty(changed, dtype=np.int64 if wide else np.int32)
    counting.places(mask, 0, out)
    there = torch.from_numpy(out)
    crc = zlib.crc32(tensors.raw(bits))
    made = Part(x.dtype, tuple(x.shape), "indices", there, bits[there.to(bits.device).long()].cpu(), crc)
    return made if places <= mask.size else replace(made, form="mask", where=torch.from_numpy(mask))


def _unfit(part: Part) -> str | None:
    """What is wrong with a part that was read; None: nothing."""
    numel = part.numel
    if part.bits.dtype != BITS[part.dtype.itemsize] or part.bits.dim() != 1:
        return f"has {part.bits.dtype} for the bits of {part.dtype}"
    if part.form == "all":
        return None if part.changed == numel else f"has {part.changed} of {numel} values"
    if part.form == "mask":
        if part.where.dtype != torch.uint8 or part.where.shape != ((numel + 7) // 8,):
            return "has a mask of another size"
        lit = np.unpackbits(part.where.numpy(), bitorder="little")
        if lit[numel:].any() or int(np.count_nonzero(lit)) != part.changed:
            return f"has {int(np.count_nonzero(lit))} places for {part.changed} values"
        return None
    if part.where.dtype not in (torch.int32, torch.int64) or part.where.shape != part.bits.shape:
        return "has other indices than values"
    at = part.where.numpy()
    if at.size and (int(at[0]) < 0 or int(at[-1]) >= numel or not bool((np.diff(at) > 0).all())):
        return "has indices that are not in order, or outside the tensor"
    return None
