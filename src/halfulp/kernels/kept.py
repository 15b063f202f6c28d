"""Compiled code, kept for the next process.

numba keeps an index beside numbered files. It writes the index before the file that it names, and two
processes that compile at once choose the same number. So a process that reads in between (a rank that starts
a moment later, or any after a kill) may be given the code of another version or for other types. Here a file
is named by what is in it, appears whole, and carries its digest: damaged, it is as if it were not there.
"""

from __future__ import annotations

import glob
import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile

DIGEST_BYTES = 32


class Kept(IndexDataCacheFile):  # type: ignore[misc]  # numba has no types
    """The compiled forms of one function, a file each; ``stamp``: of all the sources that it is made from."""

    def __init__(self, like: IndexDataCacheFile, stamp: str) -> None:
        self._base = like._index_name.removesuffix(".nbi")
        super().__init__(like._cache_path, self._base, stamp)

    def _name(self, key: Any) -> str:
        """``key``: types of arguments, processor, digests of the function's own code."""
        content = hashlib.sha256(repr((self._version, key)).encode()).hexdigest()
        return f"{self._base}.{self._source_stamp[:16]}.{content[:24]}.nbc"

    def save(self, key: Any, data: Any) -> None:
        """Keep it, if the disk has room: a run that compiles once more is slower, not wrong."""
        content = self._dump(data)
        with suppress(OSError), self._open_for_write(self._data_path(self._name(key))) as out:
            out.write(content + hashlib.sha256(content).digest())
        for old in Path(self._cache_path).glob(f"{glob.escape(self._base)}.*nb[ci]"):
            if not old.name.startswith(f"{self._base}.{self._source_stamp[:16]}."):
                with suppress(OSError):
                    old.unlink()

    def load(self, key: Any) -> Any:
        name = self._name(key)
        try:
            found = Path(self._data_path(name)).read_bytes()
            content, digest = found[:-DIGEST_BYTES], found[-DIGEST_BYTES:]
            return self._load_data(name) if hashlib.sha256(content).digest() == digest else None
        except OSError:
            return None
