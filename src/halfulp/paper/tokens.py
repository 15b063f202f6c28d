"""Turn text into tokens (characters or bytes; for byte pairs see `halfulp.data.bpe`), in nanoGPT's files.

Tokens are unsigned 16-bit integers, one after another: ``train.bin`` of nanoGPT is exactly such an array on
disk, without a header, so a file made there is opened here and the other way round.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from halfulp.errors import CorruptionError, UsageError

Tokens = npt.NDArray[np.uint16]


# ---- files ------------------------------------------------------------------------------------------


def read_raw(path: Path) -> bytes:
    """Return the content of a file; decompressed if its name ends in .gz."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, without changing its line ends."""
    return read_raw(path).decode("utf-8")


def open_bin(path: str | Path) -> Tokens:
    """Map a token file into memory: nanoGPT's layout, uint16 without a header."""
    size = Path(path).stat().st_size
    if size == 0 or size % 2:
        raise CorruptionError(f"{path} is not a token file: {size:,} bytes are no row of 16-bit numbers.")
    return np.memmap(path, dtype="<u2", mode="r")


def write_bin(path: str | Path, tokens: npt.ArrayLike) -> None:
    """Write a token file under a temporary name, then rename it."""
    values = np.asarray(tokens)
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iu":
        raise UsageError(f"tokens are whole numbers in a row, not {values.dtype} of {values.shape}.")
    if int(values.min()) < 0 or int(values.max()) > 0xFFFF:
        raise UsageError(f"tokens must fit 16 bits: found {values.min()} to {values.max()}.")
    aside = Path(f"{path}.{os.getpid()}.part")
    try:
        values.astype("<u2").tofile(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


# ---- characters and bytes ---------------------------------------------------------------------------


def characters(text: str) -> tuple[Tokens, str]:
    """Number every character by its place in the sorted alphabet of the text; return numbers and alphabet.

    >>> tokens, alphabet = characters("banana")
    >>> tokens.tolist(), alphabet
    ([1, 0, 2, 0, 2, 0], 'abn')
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    alphabet, tokens = np.unique(points, return_inverse=True)
    if len(alphabet) > 1 << 16:
        raise UsageError(f"{len(alphabet):,} different characters do not fit 16-bit tokens.")
    return tokens.astype(np.uint16), "".join(map(chr, alphabet))


def raw_bytes(content: bytes) -> Tokens:
    """Return the tokens of bytes, one token per byte.

    >>> raw_bytes("aé".encode()).tolist()
    [97, 195, 169]
    """
    return np.frombuffer(content, dtype=np.uint8).astype(np.uint16)
