"""Read the tensors of a checkpoint piece by piece, so that memory does not grow with the file.

A checkpoint is a ``.safetensors`` file, the index of a sharded one (``*.safetensors.index.json``), a folder
of either, a file of ``torch.save``, a GGUF file, or tensors in memory. Files are read by ``pread`` into one
buffer per thread, not mapped: if a mapped file shrinks or a disk fails, a signal ends the process, and pages
that were read stay in memory until the system needs it. Files of ``torch.save`` are mapped all the same,
because torch has no other way to read a part of them; only tensors are taken from them, and no code is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import files, tensors
from halfulp.checkpoints import gguf_file
from halfulp.documents import MOST_BYTES, parsed
from halfulp.errors import CorruptionError, UsageError
from halfulp.text import shown

Array = npt.NDArray[Any]
INDEX = (".safetensors.index.json", ".bin.index.json")
"""Suffixes of index files, the preferred one first."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of ``torch.save`` files."""
MODELS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which such a file keeps a model's tensors, if it is not itself the mapping."""


@dataclass(frozen=True)
class Stored(tensors.Place):
    """One tensor, wherever it lies; its ``kind`` is its dtype in words."""

    source: int | memoryview
    """An open file, or the bytes themselves."""
    path: Path | None = None

    def read(self, at: int, into: Array) -> None:
        """Fill an array of bytes, beginning ``at`` bytes into the tensor."""
        if isinstance(self.source, memoryview):
            into[:] = np.frombuffer(self.source[at : at + into.size], dtype=np.uint8)
            return
        left, place = memoryview(into.data), self.first + at
        while left:
            try:
                got = os.preadv(self.source, [left], place)
            except OSError as error:
                raise files.refused_reading(self.path or Path(), error) from error
            if not got:
                raise CorruptionError(f"{self.path} was cut short while it was read.")
            left, place = left[got:], place + got

    def values(self, first: int, count: int) -> torch.Tensor:
        """Return some of the values, in the dtype in which they are stored; the dtype must be known."""
        assert self.dtype is not None
        raw = np.empty(count * self.dtype.itemsize, dtype=np.uint8)
        self.read(first * self.dtype.itemsize, raw)
        return torch.from_numpy(raw).view(self.dtype)


@contextmanager
def opened(checkpoint: Path | Mapping[str, torch.Tensor]) -> Iterator[dict[str, Stored]]:
    """Yield the tensors of a checkpoint by name, in the order in which they lie, with its files open."""
    with ExitStack() as stack:
        if not isinstance(checkpoint, Path):
            yield {stored.name: stored for stored in _in_memory(checkpoint)}
            return
        parts = (_in_file(path, stack) for path in shards(checkpoint))
        yield {stored.name: stored for part in parts for stored in part}


def _in_memory(tensors_by_name: Mapping[str, torch.Tensor]) -> Iterator[Stored]:
    for name, x in tensors_by_name.items():
        kind = str(x.dtype).removeprefix("torch.")
        yield Stored(name, kind, x.dtype, tuple(x.shape), 0, x.numel() * x.element_size(), tensors.raw(x))


def _in_file(path: Path, stack: ExitStack) -> Iterator[Stored]:
    """Yield the tensors of one file, which stays open until the stack is left."""
    if path.suffix in PICKLED:
        yield from _in_memory(_weights(unpickled(path), path))
        return
    places = gguf_file.places(path) if path.suffix == ".gguf" else tensors.places(path)
    file = stack.enter_context(files.opened(path, follow=True))
    for p in places:
        kind = p.kind if p.dtype is None else str(p.dtype).removeprefix("torch.")
        yield Stored(p.name, kind, p.dtype, p.shape, p.first, p.size, file.fileno(), path)


def unpickled(path: Path) -> Any:
    """Read a file of ``torch.save`` without running code from it.

    Raises:
        UsageError: If it holds more than tensors and plain values, or is no such file.
    """
    try:
        try:
            return torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        except RuntimeError:  # one of the old format, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise files.refused_reading(path, error) from error
    except Exception as error:  # torch's reader meets garbage with errors of many kinds
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{path} cannot be read without running code from it, or is damaged: {shown(why, 200)} "
            "Load it yourself and save its tensors with safetensors.torch.save_file."
        ) from error


def _weights(held: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model in the content of a file."""
    for key in MODELS:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
            break
    pairs = held.items() if isinstance(held, Mapping) else ()
    by_name = {str(name): x for name, x in pairs if isinstance(x, torch.Tensor)}
    if not by_name:
        raise UsageError(f"{path} holds no mapping of names to tensors, as a model's state_dict is.")
    return by_name


def shards(path: Path) -> list[Path]:
    """Return the files of a checkpoint: the file itself, those that an index names, or those of a folder."""
    if path.is_dir():
        inside = sorted(path.iterdir())
        for index, single in zip(INDEX, (".safetensors", "model.bin"), strict=True):
            indices = [p for p in inside if p.name.endswith(index)]
            if len(indices) > 1:
                names = ", ".join(shown(p.name) for p in indices)
                raise UsageError(f"{path} holds {len(indices)} checkpoints ({names}): name one of them.")
            if singles := [p for p in inside if p.name.endswith(single)]:
                return shards(indices[0]) if indices else singles
            if indices:
                return shards(indices[0])
        raise UsageError(f"{path} holds no .safetensors file and no pytorch_model.bin.")
    if not path.is_file():
        raise UsageError(
            f"no checkpoint at {path}: give a folder, or a .safetensors, .bin, .pt or .gguf file."
        )
    if path.suffix != ".json":
        return [path]
    document = parsed(files.read(path, MOST_BYTES, follow=True), path, "the index of a checkpoint")
    listed = document.get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise CorruptionError(f"{path} is not the index of a checkpoint: its weight_map names no files.")
    parts: list[str] = sorted(set(listed.values()))
    for name in parts:
        if Path(name).name != name:
            raise CorruptionError(f"{path} names {shown(name)!r}, which is not a file beside it.")
    if any(Path(name).suffix in PICKLED for name in parts):
        return [path.parent / name for name in parts]
    held = {p.name for name in parts for p in tensors.places(path.parent / name)}
    if missing := sorted(set(listed) - held):
        raise CorruptionError(
            f"{path} names {len(missing)} tensor(s) that its files do not hold, such as "
            f"{shown(missing[0])!r}."
        )
    return [path.parent / name for name in parts]
