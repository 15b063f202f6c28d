r"""Byte-pair encoding: split text into words as GPT-2 does, encode it, and learn an encoding.

GPT-2's encoding (Radford et al. 2019) first cuts text into words, each with the blank before it, then
writes a word as bytes and joins neighbouring pieces, always the pair that was learned first, until
nothing can be joined. Here the words are found by the standard library's ``re``, which has no classes for
letters and numbers as Unicode defines them; they are spelled out from ``unicodedata`` instead
(``\w`` cannot be used: it includes the underscore, and calls the ideograph for "one" a number).

*Learning* counts the words of a text and repeatedly joins the most frequent pair of neighbours everywhere;
among equally frequent pairs, the one whose pieces were known first. So the pieces are a function of the text,
and those made here are byte for byte those of the library ``tokenizers`` (0.23).

>>> encoder, merges = learn({"low": 5, "lower": 2}, 258)
>>> merges
[('l', 'o'), ('lo', 'w')]
"""

from __future__ import annotations

import heapq
import json
import re
import sys
import unicodedata
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from halfulp.data import find
from halfulp.errors import CorruptionError

CACHED_WORDS = 1 << 20


class Gpt2Bpe:
    """A byte-pair encoding like GPT-2's.

    Args:
        encoder: The number of every piece.
        merges: The pairs of pieces that are joined, in the order in which they were learned.

    >>> bpe = Gpt2Bpe({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    >>> bpe.encode("aab")
    [0, 2]
    """

    def __init__(self, encoder: dict[str, int], merges: list[tuple[str, str]]) -> None:
        self.encoder, self.decoder = encoder, {number: text for text, number in encoder.items()}
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._known: dict[str, list[int]] = {}

    @classmethod
    def load(cls, encoder: Path, vocabulary: Path) -> Gpt2Bpe:
        """Read an encoding in GPT-2's files.

        Args:
            encoder: The file ``encoder.json``, the number of every piece.
            vocabulary: The file ``vocab.bpe``, the pairs to join.

        Raises:
            CorruptionError: If the second file is not a list of pairs.
        """
        lines = vocabulary.read_text("utf-8").split("\n")
        pairs = [line.split(" ") for line in lines[1:] if line]  # the first line is a version
        if any(len(pair) != 2 for pair in pairs):
            raise CorruptionError(f"{vocabulary} is not a list of pairs to join.")
        return cls(json.loads(encoder.read_text("utf-8")), [(a, b) for a, b in pairs])

    @classmethod
    def published(cls) -> Gpt2Bpe:
        """Read GPT-2's own encoding from the data sets ``gpt2_bpe/...``."""
        return cls.load(find("gpt2_bpe/encoder.json"), find("gpt2_bpe/vocab.bpe"))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; a mark in it such as ``<|endoftext|>`` is encoded as plain text."""
        out: list[int] = []
        for word in word_pattern().findall(text):
            tokens = self._known.get(word)
            if tokens is None:
                tokens = self._word(word)
                if len(self._known) < CACHED_WORDS:
                    self._known[word] = tokens
            out += tokens
        return out

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens; bytes that are not valid text become replacement characters."""
        symbols = "".join(self.decoder[int(t)] for t in tokens)
        values = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        return bytes(values[s] for s in symbols).decode("utf-8", "replace")

    def _word(self, word: str) -> list[int]:
        parts = spelled(word)
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


def learn(words: Mapping[str, int], tokens: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learn an encoding from words and their counts.

    Args:
        words: Words, as :func:`word_pattern` finds them, and their counts.
        tokens: The number of pieces to make, including the 256 bytes.

    Returns:
        The number of every piece, and the pairs in the order in which they are joined.
    """
    names = sorted(byte_symbols())
    number = {name: i for i, name in enumerate(names)}
    texts = [[number[symbol] for symbol in spelled(word)] for word in words]
    counts = list(words.values())
    pairs: dict[tuple[int, int], int] = {}
    where: dict[tuple[int, int], set[int]] = {}
    for at, text in enumerate(texts):
        for pair in pairwise(text):
            pairs[pair] = pairs.get(pair, 0) + counts[at]
            where.setdefault(pair, set()).add(at)
    waiting = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(waiting)
    merges: list[tuple[str, str]] = []
    while len(names) < tokens and waiting:
        count, pair = heapq.heappop(waiting)
        if -count != pairs[pair]:  # it has changed since
            heapq.heappush(waiting, (-pairs[pair], pair))
            continue
        if not count:
            break
        merges.append((names[pair[0]], names[pair[1]]))
        names.append("".join(merges[-1]))
        new = number.setdefault(names[-1], len(names) - 1)
        more: set[tuple[int, int]] = set()
        for at in where.pop(pair):
            before, texts[at] = texts[at], _joined(texts[at], pair, new)
            for old in pairwise(before):
                pairs[old] -= counts[at]
            for joined in pairwise(texts[at]):
                pairs[joined] = pairs.get(joined, 0) + counts[at]
                if new in joined:
                    where.setdefault(joined, set()).add(at)
                    more.add(joined)
        for joined in more:
            heapq.heappush(waiting, (-pairs[joined], joined))
    return number, merges


def _joined(text: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """Replace every occurrence of a pair, from the left, by one piece."""
    out: list[int] = []
    i = 0
    while i < len(text):
        here = i + 1 < len(text) and (text[i], text[i + 1]) == pair
        out.append(new if here else text[i])
        i += 2 if here else 1
    return out


def spelled(word: str) -> list[str]:
    """Return the bytes of a word, one symbol each."""
    symbols = byte_symbols()
    return [symbols[byte] for byte in word.encode("utf-8", "surrogatepass")]


@cache
def byte_symbols() -> tuple[str, ...]:
    """Return a printable character for every byte: itself where it is one, otherwise the next from 256 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in own else next(others)) for byte in range(256))


@cache
def word_pattern() -> re.Pattern[str]:
    """Return GPT-2's pattern of words: endings after an apostrophe, letters, numbers, others, blanks."""
    letter, number = _category("L"), _category("N")
    blank = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # White_Space; \s holds more
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{blank}{letter}{number}]+"
        rf"|[{blank}]+(?![^{blank}])|[{blank}]+"
    )


def _category(first: str) -> str:
    """Return the inside of a character class: all characters whose Unicode category begins with `first`."""
    inside = [unicodedata.category(chr(i))[0] == first for i in range(sys.maxunicode + 1)]
    edges = np.flatnonzero(np.diff(np.array([False, *inside, False]).astype(np.int8)))
    return "".join(
        f"\\U{a:08x}-\\U{b - 1:08x}" for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    )
