"""Tensors of a checkpoint, read piece by piece: the memory that this takes does not grow with the file.

A checkpoint is a ``.safetensors`` file, the index of a sharded one (``*.safetensors.index.json``), a folder
of either, or tensors in memory. Files are read by ``pread`` into one buffer a thread, not mapped: a mapped
file that shrinks or a disk that fails ends the process by a signal, and pages that were looked at stay
until the system wants them back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import files, tensors
from halfulp.documents import MOST_BYTES, parsed
from halfulp.errors import CorruptionError, UsageError
from halfulp.text import shown

Array = npt.NDArray[Any]
INDEX = ".safetensors.index.json"


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


@contextmanager
def opened(what: Path | Mapping[str, torch.Tensor]) -> Iterator[Iterator[Stored]]:
    """The tensors of a checkpoint, in the order in which they lie; one file is open at a time."""
    walk = _in_files(shards(what)) if isinstance(what, Path) else _in_memory(what)
    try:
        yield walk
    finally:
        walk.close()


def _in_memory(held: Mapping[str, torch.Tensor]) -> Any:
    for name, x in held.items():
        kind = str(x.dtype).removeprefix("torch.")
        yield Stored(name, kind, x.dtype, tuple(x.shape), 0, x.numel() * x.element_size(), tensors.raw(x))


def _in_files(paths: list[Path]) -> Any:
    for path in paths:
        places = tensors.places(path)
        with files.opened(path, follow=True) as file:
            for p in places:
                kind = p.kind if p.dtype is None else str(p.dtype).removeprefix("torch.")
                yield Stored(p.name, kind, p.dtype, p.shape, p.first, p.size, file.fileno(), path)


def shards(path: Path) -> list[Path]:
    """The files of a checkpoint: the file itself, those that an index names, or those of a folder."""
    if path.is_dir():
        indices = sorted(p for p in path.iterdir() if p.name.endswith(INDEX))
        if len(indices) > 1:
            names = ", ".join(shown(p.name) for p in indices)
            raise UsageError(f"{path} holds {len(indices)} checkpoints ({names}): name one of them.")
        found = sorted(p for p in path.iterdir() if p.name.endswith(".safetensors"))
        if not indices and not found:
            raise UsageError(f"{path} holds no .safetensors file.")
        return shards(indices[0]) if indices else found
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path}.")
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
    held = {p.name for name in parts for p in tensors.places(path.parent / name)}
    if missing := sorted(set(listed) - held):
        raise CorruptionError(
            f"{path} names {len(missing)} tensor(s) that its files do not hold, such as "
            f"{shown(missing[0])!r}."
        )
    return [path.parent / name for name in parts]
