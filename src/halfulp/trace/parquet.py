"""What a Parquet file says of itself, held against its size and its rows before polars believes it.

polars allocates what a file's footer and the headers of its pages ask for. One number in such a header (a
page of -13 values) is enough for a request that no machine can meet, and a request that is not met ends the
whole process: no exception is raised that could be caught. So the footer and every header are read here
first. They are structs of Thrift's compact protocol, of which a file needs little: numbers, texts, lists and
structs. Nothing is decoded: what is wrong *inside* a page, polars finds, and raises.

What must hold: every page lies in the file, one after the other, and fills the chunk of its column exactly;
pages have as many values together as their chunk and its group of rows; and none is larger, unpacked, than
so many numbers can be.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from halfulp import files
from halfulp.errors import CorruptionError

Content = bytes | mmap.mmap
MAGIC = b"PAR1"
END_BYTES = 8  # the length of the footer, and the magic again
DEEPEST = 12  # structs within structs; a file has six
WIDEST_BYTES = 16
"""Of a value, unpacked: a number of eight bytes, its level, and what encodings add to it."""
SPARE_BYTES = 1 << 16  # of a page, however few its values

ROWS, GROUPS = 3, 4  # of a file
COLUMNS, GROUP_ROWS = 1, 3  # of a group of rows
ELSEWHERE, CHUNK = 1, 3  # of a column
VALUES, PACKED, DATA_AT, DICTIONARY_AT = 5, 7, 9, 11  # of a chunk
KIND, UNPACKED_PAGE, PACKED_PAGE = 1, 2, 3  # of a page
HEADS = {0: 5, 2: 7, 3: 8}  # by kind of page: where its own header is
DICTIONARY = 2
COUNT = 1  # of a page's own header


class _Struct:
    """Reads structs of the compact protocol from bytes: fields by number, unknown ones too."""

    def __init__(self, content: Content, at: int, end: int) -> None:
        self.content, self.at, self.end = content, at, end

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.content[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, count: int) -> None:
        if count > self.end - self.at:
            raise ValueError("something that ends behind its end")
        self.at += count

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # a flag, which is all in its kind
            return kind == 1
        if kind == 3:
            self._skip(1)
        elif kind in (4, 5, 6):
            return self._signed()
        elif kind == 7:
            self._skip(8)
        elif kind == 8:
            self._skip(self._unsigned())
        elif kind in (9, 10):
            return self._list(depth)
        elif kind == 12:
            return self.read(depth)
        else:
            raise ValueError(f"a field of unknown kind {kind}")
        return None

    def _list(self, depth: int) -> list[Any]:
        head = self.content[self.at]
        self.at += 1
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._unsigned()
        if count > self.end - self.at:
            raise ValueError("a list of more entries than bytes")
        return [self._value(3 if kind in (1, 2) else kind, depth) for _ in range(count)]

    def read(self, depth: int = 0) -> dict[int, Any]:
        if depth > DEEPEST:
            raise ValueError("structs nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while True:
            head = self.content[self.at]
            self.at += 1
            if head == 0:
                if self.at > self.end:
                    raise ValueError("a struct that ends behind its end")
                return found
            number = number + (head >> 4) if head >> 4 else self._signed()
            found[number] = self._value(head & 15, depth + 1)


def rows(file: Path) -> int:
    """How many rows a file has; one that asks for more than it can hold is refused."""
    with files.opened(file) as opened:
        if not os.fstat(opened.fileno()).st_size:  # of nothing there is no map
            return _rows(b"", file)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _rows(content, file)


def read(content: bytes, place: object) -> pl.DataFrame:
    """A table from the content of a file, checked as :func:`rows` does."""
    _rows(content, place)
    with refusing(place):
        return pl.read_parquet(io.BytesIO(content))


@contextmanager
def refusing(place: object) -> Iterator[None]:
    """What polars raises of a damaged file is an error of halfulp's."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        if files.is_anothers(error):
            raise
        raise CorruptionError(f"{place} cannot be read: {error}.") from None


def _rows(content: Content, place: object) -> int:
    try:
        return _checked(content)
    except (ValueError, LookupError, TypeError) as error:
        said = error if isinstance(error, ValueError) else "its footer or a page's header is damaged"
        raise CorruptionError(f"{place} is no whole Parquet file: {said}.") from None


def _checked(content: Content) -> int:
    size = len(content)
    if size < len(MAGIC) + END_BYTES or content[:4] != MAGIC or content[-4:] != MAGIC:
        raise ValueError("it does not begin and end as one")
    end = size - END_BYTES
    begin = end - int.from_bytes(content[end : end + 4], "little")
    if begin < len(MAGIC):
        raise ValueError("its footer is longer than itself")
    footer = _Struct(content, begin, end).read()
    rows = 0
    for group in footer[GROUPS]:
        rows += _between(group[GROUP_ROWS], 0, footer[ROWS], "rows of a group")
        for column in group[COLUMNS]:
            if ELSEWHERE in column:
                raise ValueError("a column lies in another file")
            if column[CHUNK][VALUES] != group[GROUP_ROWS]:
                raise ValueError(f"a column of {column[CHUNK][VALUES]} values, and {group[GROUP_ROWS]} rows")
            _check_pages(content, column[CHUNK], begin)
    if rows != footer[ROWS]:
        raise ValueError(f"{footer[ROWS]} rows, and {rows} in its groups")
    return rows


def _check_pages(content: Content, chunk: dict[int, Any], end: int) -> None:
    if chunk[VALUES] == chunk[PACKED] == 0:
        return  # and where nothing lies need not be said
    at = chunk.get(DICTIONARY_AT) or chunk[DATA_AT]
    _between(at, len(MAGIC), end, "a chunk's place")
    end = at + _between(chunk[PACKED], 0, end - at, "bytes of a chunk")
    left = chunk[VALUES]
    while at < end:
        page = _Struct(content, at, end)
        head = page.read()
        own = head[HEADS[head[KIND]]]
        count = _between(own[COUNT], 0, chunk[VALUES], "values of a page")
        most = count * WIDEST_BYTES + SPARE_BYTES
        _between(head[UNPACKED_PAGE], 0, most, "bytes of a page")
        at = page.at + _between(head[PACKED_PAGE], 0, end - page.at, "packed bytes of a page")
        for number, length in own.items():
            if number != COUNT and type(length) is int:  # levels, nulls, rows, encodings; a flag is none
                _between(length, 0, most, "a length or a kind")
        left -= 0 if head[KIND] == DICTIONARY else count
    if left:
        raise ValueError(f"pages with {chunk[VALUES] - left} values of {chunk[VALUES]}")


def _between(value: Any, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what}: {value}, expected {least} to {most}")
    return value
