"""Compiled code that several processes keep and find at once."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from halfulp.kernels.kept import Kept
from halfulp.kernels.simd import kernel

FLOAT, DOUBLE = (("float32",), "cpu"), (("float64",), "cpu")


def kept(folder: Path, stamp: str = "a" * 64) -> Kept:
    return Kept(IndexDataCacheFile(str(folder), "module.function-1.py311", "numba's"), stamp)


def test_two_that_compile_at_once(tmp_path: Path) -> None:
    """Neither is ever given what the other made for other types, whatever comes first."""
    one, other = kept(tmp_path), kept(tmp_path)
    with one._open_for_write(one._data_path(one._name(FLOAT))):
        other.save(DOUBLE, "for doubles")
        assert other.load(FLOAT) is None
    one.save(FLOAT, "for floats")
    for reader in (one, other, kept(tmp_path)):
        assert (reader.load(FLOAT), reader.load(DOUBLE)) == ("for floats", "for doubles")


def test_other_sources(tmp_path: Path) -> None:
    """Code of another version is never found, and goes when there is new code; numba's own files too."""
    kept(tmp_path).save(FLOAT, "old")
    (tmp_path / "module.function-1.py311.nbi").touch()
    (tmp_path / "module.function-11.py311.1.nbc").touch()
    new = kept(tmp_path, "b" * 64)
    assert new.load(FLOAT) is None
    new.save(FLOAT, "new")
    assert new.load(FLOAT) == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        new._name(FLOAT),
        "module.function-11.py311.1.nbc",
    ]


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is compiled again by the next process; nothing fails."""
    one = kept(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(one, "_open_for_write", full)
    one.save(FLOAT, "code")
    assert one.load(FLOAT) is None


def test_damage_is_noticed(tmp_path: Path) -> None:
    one = kept(tmp_path)
    one.save(FLOAT, list(range(100)))
    file = Path(one._data_path(one._name(FLOAT)))
    whole = file.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:30] + b"?" + whole[31:]):
        file.write_bytes(damaged)
        assert one.load(FLOAT) is None
    one.save(FLOAT, "again")
    assert one.load(FLOAT) == "again"


def test_names_are_the_same_in_every_process() -> None:
    """What a name is made of has no address of this process in it."""

    @kernel
    def doubled(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = 2 * x[i]

    x = np.arange(3.0)
    doubled(x, x)
    assert x.tolist() == [0.0, 2.0, 4.0]
    cache, (signature,) = doubled._cache, doubled.signatures
    key = cache._index_key(signature, doubled.targetctx.codegen())
    assert isinstance(cache._cache_file, Kept)
    assert "0x" not in repr(key)
    assert "float64" in repr(key)
