"""Read the tensors of a checkpoint piece by piece, so that memory does not grow with the file.

A checkpoint is a ``.safetensors`` file, the index of a sharded one (``*.safetensors.index.json``), a folder
of either, a file of ``torch.save``, a GGUF file, or tensors in memory. A name stands for one tensor: an index
says which file holds it, and files without an index may not share it. Files are read by ``pread`` into one
buffer per thread, not mapped: if a mapped file shrinks or a disk fails, a signal ends the process, and pages
that were read stay in memory until the system needs it. Files of ``torch.save`` are mapped all the same,
because torch has no other way to read a part of them; only tensors are taken from them, and no code is run.
"""

from __future__ import annotations

import errno
import os
import re
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
from halfulp.documents import MOST_BYTES, check_keys, parsed
from halfulp.errors import CorruptionError, UsageError
from halfulp.text import shown

Array = npt.NDArray[Any]
INDEX = (".safetensors.index.json", ".bin.index.json")
"""Suffixes of index files, the preferred one first."""
WHOLE = "model.safetensors"
"""The file of a folder without an index that holds the whole model; others are variants of it."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of ``torch.save`` files."""
FOREIGN = re.compile(r"GLOBAL (\S+)|must be imported to load .+")
"""What torch's reader says of an object that is neither a tensor nor a plain value."""
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


def located(what: Any) -> Path | Mapping[str, torch.Tensor]:
    """Return the path of a checkpoint, or its tensors by name; refuse what is neither."""
    if isinstance(what, str | Path) and str(what):
        return Path(what)
    if isinstance(what, Mapping):
        for name, x in what.items():
            if not (isinstance(name, str) and isinstance(x, torch.Tensor)):
                at = f"{shown(repr(name))} has a {type(x).__name__}"
                raise UsageError(f"a checkpoint in memory maps names to torch tensors, but {at}.")
        return what
    given = "an empty name" if isinstance(what, str) else type(what).__name__
    raise UsageError(f"a checkpoint is a path, a torch module or its tensors by name, not {given}.")


@contextmanager
def opened(checkpoint: Path | Mapping[str, torch.Tensor]) -> Iterator[dict[str, Stored]]:
    """Yield the tensors of a checkpoint by name, in the order in which they lie, with its files open."""
    with ExitStack() as stack:
        if isinstance(checkpoint, Path):
            yield _in_files(checkpoint, stack)
        else:
            yield {name: in_memory(name, x) for name, x in checkpoint.items()}


def _in_files(checkpoint: Path, stack: ExitStack) -> dict[str, Stored]:
    """Return every tensor from the file that holds it; refuse a name without a file or with two."""
    by_name: dict[str, Stored] = {}
    files_of: dict[str, Path] = {}
    for path, names in shards(checkpoint).items():
        in_file = list(_in_file(path, stack))
        if names is not None and (missing := sorted(names - {stored.name for stored in in_file})):
            raise CorruptionError(
                f"{checkpoint} names {len(missing)} tensor(s) that its files do not hold, such as "
                f"{shown(missing[0])!r}, which {path.name} should."
            )
        for stored in in_file:
            if names is not None and stored.name not in names:
                continue
            if stored.name in by_name:
                where = " and ".join(shown(p.name) for p in dict.fromkeys((files_of[stored.name], path)))
                raise UsageError(
                    f"{checkpoint} holds {shown(stored.name)!r} twice (in {where}), and no index says which "
                    "one counts: name one file."
                )
            by_name[stored.name], files_of[stored.name] = stored, path
    return by_name


def in_memory(name: str, x: torch.Tensor, most: int | None = None) -> Stored:
    """Return a tensor as if it were stored; one without plain values (sparse, meta, ...) has no dtype.

    ``most`` is the size of its file: what has more bytes repeats a few, and copying it out could fill memory.
    """
    kind = str(x.dtype).removeprefix("torch.")
    layout = "nested" if x.is_nested else "meta" if x.is_meta else str(x.layout).removeprefix("torch.")
    if layout == "strided" and most is not None and x.nbytes > most:
        layout = "expanded"
    if layout != "strided" or x.is_quantized:
        shape = () if x.is_nested else tuple(x.shape)
        return Stored(
            name, kind if x.is_quantized else f"{layout} {kind}", None, shape, 0, 0, memoryview(b"")
        )
    return Stored(name, kind, x.dtype, tuple(x.shape), 0, x.numel() * x.element_size(), tensors.raw(x))


def _in_file(path: Path, stack: ExitStack) -> Iterator[Stored]:
    """Yield the tensors of one file, which stays open until the stack is left."""
    if path.suffix in PICKLED:
        most = path.stat().st_size
        yield from (in_memory(name, x, most) for name, x in _weights(unpickled(path), path).items())
        return
    places = gguf_file.places(path) if path.suffix == ".gguf" else tensors.places(path)
    file = stack.enter_context(files.opened(path, follow=True))
    for p in places:
        kind = p.kind if p.dtype is None else str(p.dtype).removeprefix("torch.")
        yield Stored(p.name, kind, p.dtype, p.shape, p.first, p.size, file.fileno(), path)


def unpickled(path: Path) -> Any:
    """Read a file of ``torch.save`` without running code from it.

    Raises:
        UsageError: If it holds more than tensors and plain values.
        CorruptionError: If it is damaged, or no such file.
    """
    with files.opened(path, follow=True):  # refuses what is no file, or may not be read
        pass
    try:
        try:
            return torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        except RuntimeError:  # one of the old format, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader meets garbage with errors of many kinds
        # EINVAL: the reader wanted a place before the beginning of a file that is cut short.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise files.refused_reading(path, error) from error
        if objects := FOREIGN.search(str(error)):
            kind = shown(objects[1] or objects[0])
            raise UsageError(
                f"{path} holds Python objects ({kind}), which halfulp does not load, because that can run "
                "code: load it yourself and save its tensors with safetensors.torch.save_file."
            ) from error
        raise CorruptionError(
            f"{path} is damaged, or is no file of torch.save: {type(error).__name__} while it was read. "
            "Take it from a copy, or save it again."
        ) from error


def _weights(content: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model in the content of a file."""
    for key in MODELS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    pairs = content.items() if isinstance(content, Mapping) else ()
    by_name = {str(name): x for name, x in pairs if isinstance(x, torch.Tensor)}
    if not by_name:
        raise UsageError(f"{path} holds no mapping of names to tensors, as a model's state_dict is.")
    return by_name


def shards(path: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint, each with the names that an index gives it; None: all that it holds.

    A folder is read by its index. Without one, ``model.safetensors`` is the checkpoint, as it is for
    ``transformers``; without that, all of its files are.
    """
    try:
        if path.is_dir():
            return _of_folder(path)
        there = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise files.refused_reading(path, error) from error
    if not there:
        raise UsageError(
            f"no checkpoint at {path}: give a folder, or a .safetensors, .bin, .pt or .gguf file, of this "
            "machine. (A model of a hub is downloaded first, as by `hf download NAME --local-dir FOLDER`.)"
        )
    return _of_index(path) if path.suffix == ".json" else {path: None}


def _of_folder(path: Path) -> dict[Path, set[str] | None]:
    inside = sorted(path.iterdir())
    for index, single in zip(INDEX, (".safetensors", "model.bin"), strict=True):
        indices = [p for p in inside if p.name.endswith(index)]
        if len(indices) > 1:
            names = ", ".join(shown(p.name) for p in indices)
            raise UsageError(f"{path} holds {len(indices)} checkpoints ({names}): name one of them.")
        if indices:
            return _of_index(indices[0])
        singles = [p for p in inside if p.name.endswith(single)]
        if singles:
            return dict.fromkeys([p for p in singles if p.name == WHOLE] or singles)
    raise UsageError(f"{path} holds no .safetensors file and no pytorch_model.bin.")


def _of_index(path: Path) -> dict[Path, set[str] | None]:
    content = files.read(path, MOST_BYTES, follow=True)
    document = parsed(content, path, "the index of a checkpoint")
    check_keys(content, path)
    listed = document.get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise CorruptionError(f"{path} is not the index of a checkpoint: its weight_map names no files.")
    parts: dict[Path, set[str] | None] = {}
    for file in sorted(set(listed.values())):
        if Path(file).name != file:
            raise CorruptionError(f"{path} names {shown(file)!r}, which is not a file beside it.")
        parts[path.parent / file] = {name for name, place in listed.items() if place == file}
    return parts
