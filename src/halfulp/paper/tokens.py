"""The texts that decoders are trained on, as tokens: characters, bytes, or nanoGPT's token files.

Tokens are unsigned 16-bit integers, one after another: ``train.bin`` of nanoGPT is exactly such an array on
disk, without a header. Byte pairs are made by `halfulp.data.bpe`.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from halfulp.errors import CorruptionError, UsageError

Tokens = npt.NDArray[np.uint16]

LOOKED_AT = 1 << 20
"""So many tokens show what encoding a file has; the largest files have 9 billion."""


def open_corpus(
    file: Callable[[str], Path], corpus: Mapping[str, str], vocabulary: int
) -> tuple[Tokens, Tokens]:
    """Return training and held-out tokens; ``file`` finds a data set by its name.

    ``kind``: ``characters`` of the text ``train``, whose last tenth is held out; ``bytes`` of the texts
    ``train`` and ``held_out``; ``bin`` for token files.
    """
    paths = [file(name) for name in files_of(corpus)]
    if corpus["kind"] == "characters":
        numbered, alphabet = characters(read(paths[0]).decode("utf-8"))
        if len(alphabet) > vocabulary:
            raise UsageError(f"{paths[0]} has {len(alphabet)} characters, the model knows {vocabulary}.")
        cut = int(len(numbered) * 0.9)  # as nanoGPT cuts it
        return numbered[:cut], numbered[cut:]
    if corpus["kind"] == "bytes":
        train, held_out = (np.frombuffer(read(path), dtype=np.uint8).astype(np.uint16) for path in paths)
        return train, held_out
    train, held_out = map(open_bin, paths)
    for path, tokens in zip(paths, (train, held_out), strict=True):
        if (largest := int(tokens[:LOOKED_AT].max())) >= vocabulary:
            raise UsageError(
                f"{path} is in another encoding than the model's: expected tokens below {vocabulary:,}, "
                f"found {largest:,}. Prepare it with the tokenizer that the study's page names."
            )
    return train, held_out


def files_of(corpus: Mapping[str, str]) -> tuple[str, ...]:
    """Return the data sets that a corpus needs."""
    return tuple(corpus[part] for part in ("train", "held_out") if part in corpus)


def read(path: Path) -> bytes:
    """Return the content of a file; decompressed if its name ends in .gz."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def open_bin(path: str | Path) -> Tokens:
    """Map a token file into memory: nanoGPT's layout, uint16 without a header."""
    size = Path(path).stat().st_size
    if size == 0 or size % 2:
        raise CorruptionError(f"{path} is not a token file: {size:,} bytes are no row of 16-bit numbers.")
    return np.memmap(path, dtype="<u2", mode="r")


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
