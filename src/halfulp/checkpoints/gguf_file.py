"""Locate the tensors of a GGUF file by reading only its header.

The format is a magic word, a version, key-value pairs about the model, one entry per tensor (name, dimensions
fastest first, type, offset), and the aligned data. The library that defines it maps the whole file and
trusts its contents. Here every count and offset is checked against the size of the file, and values are
skipped, because only tensors are needed. Quantised types keep their name but get no dtype: nobody trains
them.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

import torch

from halfulp import files
from halfulp.errors import CorruptionError
from halfulp.tensors import Place
from halfulp.text import shown

DTYPES = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
QUANTISED = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4",
}  # fmt: skip
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type; strings and arrays say their own length."""
UINT32, STRING, ARRAY = 4, 8, 9
MOST_DIMENSIONS = 8


def places(path: Path) -> list[Place]:
    """Return where the tensors of a file lie, in the order of their bytes.

    Raises:
        CorruptionError: If it is no GGUF file of version 2 or 3, or cut short.
    """
    with files.opened(path, follow=True) as raw, open(raw.fileno(), "rb", closefd=False) as file:
        tensors = _Header(file, os.fstat(raw.fileno()).st_size, path).tensors()
    return sorted(tensors, key=lambda place: place.first)


class _Header:
    """The header, from its first byte on."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.size, self.path, self.at = file, size, path, 0

    def tensors(self) -> list[Place]:
        """Read it to its end."""
        if self._take(4) != b"GGUF":
            self._refuse("it does not begin as one")
        if (version := self._number("I")) not in (2, 3):
            self._refuse(f"version {version}, expected 2 or 3")
        count, pairs = self._number("Q"), self._number("Q")
        alignment = 32
        for _ in range(pairs):
            key, kind = self._text(), self._number("I")
            if key == "general.alignment" and kind == UINT32:
                alignment = self._number("I")
            else:
                self._skip(kind)
        if not 1 <= alignment <= 1 << 20:
            self._refuse(f"an alignment of {alignment}")
        entries = [self._entry() for _ in range(min(count, self.size))]
        begins = -(-self.at // alignment) * alignment
        return [self._place(begins, *entry) for entry in entries]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        if (many := self._number("I")) > MOST_DIMENSIONS:
            self._refuse(f"tensor {shown(name)} has {many} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(many)]))
        return name, shape, self._number("I"), self._number("Q")

    def _place(self, begins: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Place:
        dtype = DTYPES.get(kind)
        said = QUANTISED.get(kind, f"GGUF type {kind}")
        size = 0 if dtype is None else math.prod(shape) * dtype.itemsize
        if begins + offset + size > self.size:
            self._refuse(f"tensor {shown(name)} ends past the file's {self.size:,} bytes")
        return Place(name, said, dtype, shape, begins + offset, size)

    def _skip(self, kind: int) -> None:
        """Go past a value."""
        if kind == STRING:
            self._take(self._number("Q"), keep=False)
        elif kind == ARRAY:
            inner, many = self._number("I"), self._number("Q")
            if inner in SIZES:
                self._take(SIZES[inner] * many, keep=False)
            elif inner == STRING:
                for _ in range(many):
                    self._skip(STRING)
            else:
                self._refuse(f"an array of type {inner}")
        elif kind in SIZES:
            self._take(SIZES[kind], keep=False)
        else:
            self._refuse(f"a value of type {kind}")

    def _number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0])

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _take(self, count: int, keep: bool = True) -> bytes:
        """Read some bytes, or go past them."""
        if count > self.size - self.at:
            self._refuse("it is cut short")
        self.at += count
        if not keep:
            self.file.seek(self.at)
            return b""
        if len(got := self.file.read(count)) != count:
            self._refuse("it was cut short while it was read")
        return got

    def _refuse(self, why: str) -> NoReturn:
        raise CorruptionError(f"{self.path} is not a GGUF file that can be read: {why}.")
