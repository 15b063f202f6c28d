"""Tables of arrays: what they do with rows, and that a file holds them exactly."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.make_format_1 import model, train

import halfulp as hu
from halfulp import tensors
from halfulp.errors import MissingError
from halfulp.trace import columns
from halfulp.trace.columns import SCHEMAS, Columns

FOURTH = Path(__file__).parents[1] / "fixtures" / "format_4" / "trace"


def drawn(table: str, rows: int, seed: int = 0) -> Columns:
    """A table with numbers of every size, some of them not counted."""
    rng = np.random.default_rng(seed)
    made = {}
    for i, (name, kind) in enumerate(SCHEMAS[table].items()):
        if kind is np.float64:
            column = rng.standard_normal(rows)
            if name in columns.OPTIONAL:
                column = np.floor(rng.random(rows) * 2.0 ** (7 * i % 50))
            column[rng.random(rows) < (1.0 if name == "phase" else 0.2)] = np.nan
        else:
            most = min(np.iinfo(kind).max, 2 ** (8 * (i % 7) + 7))
            column = rng.integers(0, most, rows).astype(kind)
        made[name] = column
    return Columns(made)


@pytest.mark.parametrize("rows", [0, 1, 257])
def test_a_file_holds_tables_exactly(rows: int, tmp_path: Path) -> None:
    """Every dtype comes back; what was not counted is NaN again, and a column of that is not in the file."""
    tables = {name: drawn(name, rows, i) for i, name in enumerate(SCHEMAS)}
    packed = columns.packed(tables)
    assert "grids/phase" not in packed
    (tmp_path / "it").write_bytes(b"".join(tensors.content(packed, seal=False)))
    for name, table in tables.items():
        found = columns.read(tmp_path / "it", name, tuple(SCHEMAS[name]))
        assert found.equals(table)
        assert [found[c].dtype for c in found] == [np.dtype(kind) for kind in SCHEMAS[name].values()]
        assert columns.read(tmp_path / "it", name, ["step"]).columns == ["step"]


@pytest.mark.parametrize("sort", [True, False])
def test_sums_and_groups(sort: bool) -> None:
    """Against Python's own; the quick way of sorted keys and the other."""
    rng = np.random.default_rng(1)
    key = rng.integers(0, 9, 300)
    table = Columns({"key": np.sort(key) if sort else key, "x": rng.integers(0, 99, 300)})
    expected: dict[int, int] = {}
    for k, x in table.rows():
        expected[k] = expected.get(k, 0) + x
    found = columns.sums(table, "key", "x")
    assert dict(zip(found["key"].tolist(), found["x"].tolist(), strict=True)) == expected
    assert found["key"].tolist() == sorted(expected)
    last = columns.last_rows(table, "key")
    assert dict(last.rows()) == dict(table.rows())
    assert columns.sums(table.take(slice(0)), "key", "x")["x"].tolist() == []


def test_rows_in_order() -> None:
    table = Columns({"a": np.array([2, 1, 2, 1]), "b": np.array([0, 5, 0, 4]), "c": np.arange(4)})
    assert list(table.sort("a", "b").rows()) == [(1, 4, 3), (1, 5, 1), (2, 0, 0), (2, 0, 2)]
    assert repr(table.take(slice(1))).split() == ["a", "b", "c", "2", "0", "0"]
    with pytest.raises(hu.UsageError, match="different lengths"):
        Columns({"a": np.zeros(2), "b": np.zeros(3)})


def test_old_traces_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without polars the Parquet files of older formats cannot be read; those of today need nothing."""
    folder = Path(shutil.copytree(FOURTH, tmp_path / "trace"))
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingError, match=r"pip install 'halfulp\[old-traces\]'"):
        hu.Trace.open(folder).frozen("bf16")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with hu.Audit(optimizer, "bf16", model=net, out=tmp_path / "new"):
        train(net, optimizer, 2)
    assert len(hu.Trace.open(tmp_path / "new").table()) == 8
