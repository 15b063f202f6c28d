"""Stream safetensors files: write them with a digest, and check everything before it is used.

The format is eight bytes of length, a JSON header (name -> dtype, shape, place; ``__metadata__``: strings by
string), and the tensors' bytes one after the other. The safetensors library does not read the files here,
because a file from elsewhere is checked in a certain order: the size of the header against the file, every
tensor's size and place against its shape and the file. Only then is memory allocated, tensor by tensor, while
the digest is computed.

The digest of a file that stands alone is in its metadata (``halfulp.sha256``): SHA-256 over the canonical
JSON of the header without it, then over the tensors' bytes. Files in a part of a trace have theirs in the
part's document instead.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from halfulp import canonical, files
from halfulp.documents import Fields, parsed, whole
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.text import shown

DIGEST = "halfulp.sha256"
METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100_000_000  # as in safetensors' own reader
MOST_DIMENSIONS = 64


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in order; a view of it where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if not flat.numel():  # an empty array may have a stride of 0
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)


def content(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None, *, seal: bool = True
) -> Iterator[bytes | memoryview]:
    """Yield the chunks of a file, larger elements first, then by name; ``seal`` includes its digest."""
    if sys.byteorder != "little":
        raise UsageError("safetensors files are little-endian; this machine is not.")
    for name, t in tensors.items():
        if t.dtype not in NAMES or t.layout != torch.strided or name == METADATA:
            raise UsageError(f"tensor {name!r} is a {t.layout} of {t.dtype}: safetensors cannot hold it.")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        t = tensors[name]
        end = at + t.numel() * t.element_size()
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    if seal:
        running = hashlib.sha256(canonical.dumps(header))
        for name in order:
            running.update(raw(tensors[name]))
        header[METADATA] = {**header.get(METADATA, {}), DIGEST: running.hexdigest()}
    text = canonical.dumps(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield raw(tensors[name])


def read(
    path: Path, *, sha256: str | None = None, follow: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file; ``sha256``: that of all its bytes, if it is known.

    A digest in the metadata is checked, and taken out; whether there must be one is the format's to say.
    """
    with files.opened(path, follow=follow) as file:
        return read_stream(file, os.fstat(file.fileno()).st_size, path, sha256=sha256)


def read_stream(
    file: BinaryIO, size: int, path: Path, *, sha256: str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """:func:`read` of a file that is open, or of bytes in memory; ``path`` is named in errors."""
    start, text, header = _header(file, size, path)
    metadata = _metadata(header, path)
    stated = metadata.pop(DIGEST, None)
    whole_file = hashlib.sha256(start + text)
    sealed = None
    if stated is not None:
        digested = {k: v for k, v in header.items() if k != METADATA}
        digested |= {METADATA: metadata} if metadata else {}
        sealed = hashlib.sha256(_canonical(digested, path))
    runs = [h for h in (sealed, whole_file if sha256 is not None else None) if h is not None]
    tensors = {}
    for place in _places(header, size - 8 - len(text), path):
        if place.dtype is None:
            raise CorruptionError(
                f"{path}: tensor {place.name!r} has dtype {shown(place.kind)}, expected one of "
                f"{', '.join(DTYPES)}."
            )
        tensors[place.name] = _tensor(file, place.dtype, place.shape, path, [h.update for h in runs])
    if sha256 is not None and whole_file.hexdigest() != sha256:
        raise TamperingError(f"{path} is not what was written: its SHA-256 differs from the one recorded.")
    if sealed is not None and sealed.hexdigest() != stated:
        raise TamperingError(
            f"{path} is not what was written: its SHA-256 differs from the one in its header."
        )
    for name, t in tensors.items():
        if t.dtype == torch.bool and bool((t.view(torch.uint8) > 1).any()):
            raise CorruptionError(f"{path}: {name!r} has a byte that is neither true nor false.")
    if stated is not None:
        metadata[DIGEST] = stated
    return tensors, metadata


@dataclass(frozen=True)
class Place:
    """The position of a tensor in a file."""

    name: str
    kind: str
    """The dtype as the file names it."""
    dtype: torch.dtype | None
    """None: one that is not known here."""
    shape: tuple[int, ...]
    first: int
    """The first of its bytes, from the beginning of the file."""
    size: int


def places(path: Path) -> list[Place]:
    """Return where the tensors of a file lie, in the order of their bytes, none of which is read."""
    with files.opened(path, follow=True) as file:
        return _placed(file, path)


def read_some(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return those of a file's tensors that have one of these names; the others are not read."""
    tensors = {}
    with files.opened(path) as file:
        for place in _placed(file, path):
            if place.name in names and place.dtype is not None:
                file.seek(place.first)
                tensors[place.name] = _tensor(file, place.dtype, place.shape, path, [])
    return tensors


def _placed(file: BinaryIO, path: Path) -> list[Place]:
    size = os.fstat(file.fileno()).st_size
    _, text, header = _header(file, size, path)
    begins = 8 + len(text)
    return [replace(p, first=begins + p.first) for p in _places(header, size - begins, path)]


PICKLED = (
    " It begins as torch.save's files do, which can run code when they are read: load it yourself, and save "
    "the tensors with safetensors.torch.save_file."
)


def _header(file: BinaryIO, size: int, path: Path) -> tuple[bytes, bytes, dict[str, Any]]:
    """Return the eight bytes of length, the header's text, and what it says."""
    start = _exactly(file, min(8, size), path)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(MOST_HEADER, size - 8):
        raise CorruptionError(
            f"{path} is not a safetensors file, or is truncated: it has {size:,} bytes."
            + (PICKLED if start[:2] == b"PK" or start[:1] == b"\x80" else "")
        )
    text = _exactly(file, length, path)
    return start, text, parsed(text, path, "a safetensors file")


def _exactly(file: BinaryIO, count: int, path: Path) -> bytes:
    out = bytearray(count)
    _fill(file, memoryview(out), path)
    return bytes(out)


def _fill(file: BinaryIO, into: memoryview, path: Path) -> None:
    while into:
        got = file.readinto(into)  # type: ignore[attr-defined]  # a raw file has it
        if not got:
            raise CorruptionError(f"{path} was cut short while it was read.")
        into = into[got:]


def _canonical(header: Mapping[str, Any], path: Path) -> bytes:
    try:
        return canonical.dumps(header)
    except (UsageError, RecursionError) as error:
        raise CorruptionError(f"{path} is damaged: {error}") from None


def _metadata(header: Mapping[str, Any], path: Path) -> dict[str, str]:
    metadata = header.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptionError(f"{path} is not a safetensors file: its metadata must map strings to strings.")
    return dict(metadata)


def _places(header: Mapping[str, Any], size: int, path: Path) -> list[Place]:
    """Return the tensors in the order of their bytes, which lie one after the other and fill the file."""
    places = []
    for name, value in header.items():
        if name == METADATA:
            continue
        fields = Fields(value, f"{path}: tensor {name!r}")
        kind = fields.text("dtype", 100)
        dtype = DTYPES.get(kind)
        shape = tuple(fields.wholes("shape", MOST_DIMENSIONS))
        begin, end = fields.take(
            "data_offsets", "two places in the file",
            lambda v: isinstance(v, list) and len(v) == 2 and all(whole(x, 0, canonical.LARGEST) for x in v),
        )  # fmt: skip
        if end > size:
            raise CorruptionError(
                f"{path} is cut short: tensor {name!r} ends at byte {end:,} of the data, and the file "
                f"has {size:,} of them."
            )
        if end < begin or (dtype is not None and end - begin != math.prod(shape) * dtype.itemsize):
            raise CorruptionError(
                f"{path}: tensor {name!r} of shape {list(shape)} does not have {end - begin:,} bytes."
            )
        places.append(Place(name, kind, dtype, shape, begin, end - begin))
    at = 0
    places.sort(key=lambda p: (p.first, p.size, p.name))
    for place in places:
        if place.first != at:
            raise CorruptionError(f"{path}: tensor {place.name!r} begins at {place.first}, expected {at}.")
        at += place.size
    if at != size:
        raise CorruptionError(f"{path} is cut short or too long: its tensors take {at:,} of {size:,} bytes.")
    return places


def _tensor(
    file: BinaryIO,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    path: Path,
    also: list[Callable[[memoryview], object]],
) -> torch.Tensor:
    """Return one tensor, read into memory of its own."""
    flat = torch.empty(math.prod(shape), dtype=dtype, device="cpu")
    into = memoryview(flat.view(torch.uint8).numpy().data)
    _fill(file, into, path)
    for see in also:
        see(into)
    return flat.reshape(shape)
