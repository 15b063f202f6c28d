"""Parquet files are held against their own size before polars reads them: a wrong number would end the
process, which no test could survive."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import halfulp as hu
from halfulp.trace import parquet

FIXTURES = Path(__file__).parent / "fixtures" / "parquet"
FRAME = pl.DataFrame(
    {"step": [1, 1, 2, 2, 3, 3], "bound": [0, 1, 0, 1, 0, 1], "loss": [0.5, None, 0.25, 1.5, -1.0, 2.0]},
    schema={"step": pl.Int64, "bound": pl.Int8, "loss": pl.Float64},
)


def written(frame: pl.DataFrame, **options: Any) -> bytes:
    into = io.BytesIO()
    frame.write_parquet(into, **options)
    return into.getvalue()


@pytest.mark.parametrize("rows", [0, 1, 7, 5000, 200_000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "uncompressed"},
        {"compression": "snappy"},
        {"row_group_size": 1000},
        {"data_page_size": 100},
        {"statistics": False},
        {"statistics": "full"},
    ],
    ids=str,
)
def test_what_polars_writes_is_read(rows: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Numbers that repeat, that do not, that are all missing; in one group of rows or many."""
    frame = pl.select(
        same=pl.repeat(3, rows, dtype=pl.Int16),
        each=pl.int_range(rows, dtype=pl.Int64) * 7919,
        part=pl.int_range(rows, dtype=pl.Int64).cast(pl.Float64) / 3,
        none=pl.repeat(None, rows, dtype=pl.Float64),
    )
    content = written(frame, **options)
    (tmp_path / "it.parquet").write_bytes(content)
    assert parquet.rows(tmp_path / "it.parquet") == rows
    assert parquet.read(content, "it").equals(frame)


@pytest.mark.parametrize("file", sorted(FIXTURES.iterdir()), ids=lambda file: file.name)
def test_what_others_write_is_read(file: Path) -> None:
    """Of pyarrow 26: dictionaries and pages of version 2 have flags, and what is empty lies nowhere. Made by
    pyarrow.parquet.write_table with zstd, dictionaries, an index, checksums and both versions of pages."""
    frame = parquet.read(file.read_bytes(), file)
    rows = int(file.name.split("-")[1])
    assert parquet.rows(file) == rows
    assert frame["step"].to_list() == [i // 6 for i in range(rows)]
    assert frame["share"].to_list() == [i % 7 / 8 for i in range(rows)]
    assert frame["nothing"].null_count() == rows


def test_an_error_that_is_not_the_files() -> None:
    with pytest.raises(TimeoutError), parquet.refusing("it"):
        raise TimeoutError  # as the handler of an alarm may


def test_every_bit() -> None:
    """With any one changed, it is read or refused."""
    content = written(FRAME)
    refused = 0
    for at in range(len(content)):
        for bit in range(8):
            mutant = bytearray(content)
            mutant[at] ^= 1 << bit
            try:
                assert parquet.read(bytes(mutant), "it").height == FRAME.height
            except hu.CorruptionError:
                refused += 1
    assert refused > 2 * len(content)


def test_a_page_of_fewer_than_no_values() -> None:
    """polars asked the machine for 2**61 bytes, and the process ended."""
    kept = Path(__file__).parent / "fixtures" / "crashers"
    (crasher,) = kept.glob("a-trace,-its-tables-sealed-again-2499-*")
    with pytest.raises(hu.CorruptionError, match="values of a page: -13, expected 0 to 12"):
        parquet.rows(crasher)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "does not begin and end as one"),
        (b"PAR1" + b"\0" * 100, "does not begin and end as one"),
        (b"PAR1" + (2**31).to_bytes(4, "little") + b"PAR1", "footer is longer than itself"),
        (b"PAR1" + b"\x1c" * 40 + (40).to_bytes(4, "little") + b"PAR1", "nested too deeply"),
        (b"PAR1" + b"\x19\xf8\xff\xff\xff\x7f\0" + (7).to_bytes(4, "little") + b"PAR1", "more entries than"),
        (b"PAR1" + b"\x16" + b"\xff" * 12 + (13).to_bytes(4, "little") + b"PAR1", "more than 64 bits"),
        (b"PAR1" + b"\x18\x7f\0" + (3).to_bytes(4, "little") + b"PAR1", "ends behind its end"),
        (b"PAR1" + b"\x1e\0" + (2).to_bytes(4, "little") + b"PAR1", "unknown kind 14"),
        (b"PAR1" + b"\0" + (1).to_bytes(4, "little") + b"PAR1", "footer or a page's header is damaged"),
    ],
)
def test_what_is_no_file(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "it.parquet").write_bytes(content)
    with pytest.raises(hu.CorruptionError, match=said):
        parquet.rows(tmp_path / "it.parquet")
