"""Text to tokens: characters, bytes, and GPT-2's byte-pair encoding; token files in nanoGPT's layout.

Tokens are unsigned 16-bit integers, one after another: ``train.bin`` of nanoGPT is exactly such an array on
disk, without a header, so a file made there is opened here and the other way round.

GPT-2's encoding (Radford et al. 2019) first cuts text into words, each with the blank before it, then
writes a word as bytes and joins neighbours, the pair that was learned first before all others, until
nothing can be joined. Here the words are found by the standard library's ``re``, which has no classes for
letters and numbers as Unicode defines them; they are spelled out from ``unicodedata`` instead
(``\\w`` will not do: it holds the underscore, and calls the ideograph for "one" a number).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp import data
from halfulp.errors import CorruptionError, UsageError

Tokens = npt.NDArray[np.uint16]

END_OF_TEXT = 50256
"""GPT-2's mark between documents; text never encodes to it."""
CACHED_WORDS = 1 << 18


# ---- files ------------------------------------------------------------------------------------------


def read_raw(path: Path) -> bytes:
    """The content of a file; decompressed if its name ends in .gz."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def read_text(path: Path) -> str:
    """A text file in UTF-8, line ends as they are."""
    return read_raw(path).decode("utf-8")


def open_bin(path: str | Path) -> Tokens:
    """Map a token file into memory: nanoGPT's layout, uint16 without a header."""
    size = Path(path).stat().st_size
    if size == 0 or size % 2:
        raise CorruptionError(f"{path} is not a token file: {size:,} bytes are no row of 16-bit numbers.")
    return np.memmap(path, dtype="<u2", mode="r")


def write_bin(path: str | Path, tokens: npt.ArrayLike) -> None:
    """Write a token file; aside first, then renamed."""
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
    """Every character is the number of its place in the sorted alphabet of the text; and that alphabet.

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
    """Every byte is a token.

    >>> raw_bytes("aé".encode()).tolist()
    [97, 195, 169]
    """
    return np.frombuffer(content, dtype=np.uint8).astype(np.uint16)


# ---- GPT-2 ------------------------------------------------------------------------------------------


class Gpt2Bpe:
    """GPT-2's encoding, from its two published files.

    >>> from halfulp import data
    >>> bpe = Gpt2Bpe.published()  # doctest: +SKIP
    >>> bpe.encode("Hello, world!")  # doctest: +SKIP
    [15496, 11, 995, 0]
    """

    def __init__(self, encoder: dict[str, int], merges: list[tuple[str, str]]) -> None:
        self.encoder, self.decoder = encoder, {number: text for text, number in encoder.items()}
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._known: dict[str, list[int]] = {}

    @classmethod
    def load(cls, encoder: Path, vocabulary: Path) -> Gpt2Bpe:
        """From ``encoder.json`` and ``vocab.bpe``."""
        lines = vocabulary.read_text("utf-8").split("\n")
        pairs = [line.split(" ") for line in lines[1:] if line]  # the first line is a version
        if any(len(pair) != 2 for pair in pairs):
            raise CorruptionError(f"{vocabulary} is not a list of pairs to join.")
        return cls(json.loads(encoder.read_text("utf-8")), [(a, b) for a, b in pairs])

    @classmethod
    def published(cls) -> Gpt2Bpe:
        """From the data sets ``gpt2_bpe/...``."""
        return cls.load(data.find("gpt2_bpe/encoder.json"), data.find("gpt2_bpe/vocab.bpe"))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; a mark such as ``<|endoftext|>`` in it is plain text."""
        out: list[int] = []
        for word in word_pattern().findall(text):
            found = self._known.get(word)
            if found is None:
                found = self._word(word)
                if len(self._known) < CACHED_WORDS:
                    self._known[word] = found
            out += found
        return out

    def decode(self, tokens: Any) -> str:
        """The text of tokens; bytes that are no text are shown as replacement marks."""
        symbols = "".join(self.decoder[int(t)] for t in tokens)
        values = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        return bytes(values[s] for s in symbols).decode("utf-8", "replace")

    def _word(self, word: str) -> list[int]:
        symbols = byte_symbols()
        parts = [symbols[byte] for byte in word.encode("utf-8", "surrogatepass")]
        last = len(self.ranks)
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: self.ranks.get((parts[i], parts[i + 1]), last))
            pair = (parts[best], parts[best + 1])
            if pair not in self.ranks:
                break
            joined, i = [], 0
            while i < len(parts):  # every place of the pair, from the left
                here = tuple(parts[i : i + 2]) == pair
                joined.append("".join(pair) if here else parts[i])
                i += 2 if here else 1
            parts = joined
        return [self.encoder[part] for part in parts]


@cache
def byte_symbols() -> tuple[str, ...]:
    """A printable character for every byte: itself where it is one, otherwise the next from 256 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in own else next(others)) for byte in range(256))


@cache
def word_pattern() -> re.Pattern[str]:
    """GPT-2's cut of a text into words: endings after an apostrophe, letters, numbers, others, blanks."""
    letter, number = _category("L"), _category("N")
    blank = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # White_Space; \s holds more
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{blank}{letter}{number}]+"
        rf"|[{blank}]+(?![^{blank}])|[{blank}]+"
    )


def _category(first: str) -> str:
    """The inside of a character class: all characters whose Unicode category begins with a letter."""
    inside = [unicodedata.category(chr(i))[0] == first for i in range(sys.maxunicode + 1)]
    edges = np.flatnonzero(np.diff(np.array([False, *inside, False]).astype(np.int8)))
    return "".join(
        f"\\U{a:08x}-\\U{b - 1:08x}" for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    )
