"""Damage to files, by seed: what the fuzz of every reader has in common.

A mutation is a name and what it leaves of some bytes, or of a folder. All are functions of a
``random.Random``, so a seed that found something finds it again.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**53, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("-inf"), "", "x", "bf16", "../../etc/passwd", "\x00\x1b[31m", "\ud800", [], {},
    [[]], [None], {"": None}, "9" * 5000,
)  # fmt: skip


def flip(data: bytes, rng: random.Random, bits: int = 1) -> bytes:
    """Some bits the other way round."""
    out = bytearray(data)
    for _ in range(bits):
        place = rng.randrange(8 * len(out))
        out[place // 8] ^= 1 << place % 8
    return bytes(out)


def truncate(data: bytes, rng: random.Random) -> bytes:
    """A beginning of it."""
    return data[: rng.randrange(len(data))]


def splice(data: bytes, rng: random.Random) -> bytes:
    """A stretch doubled, dropped, zeroed, or replaced by noise."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    b = min(b, a + 64)
    middle = rng.choice([data[a:b] * 2, b"", bytes(b - a), rng.randbytes(b - a)])
    return data[:a] + middle + data[b:]


def bytewise(data: bytes, rng: random.Random) -> bytes:
    """One of the above; half of them single bits."""
    how = rng.random()
    if how < 0.5:
        return flip(data, rng)
    return rng.choice([flip, truncate, splice])(data, rng)


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document, the document itself first."""
    yield at
    items = document.items() if isinstance(document, dict) else ()
    items = enumerate(document) if isinstance(document, list) else items
    for key, value in items:
        yield from places(value, (*at, key))


def edit(document: Any, rng: random.Random) -> Any:
    """A JSON document with one structural change: a value dropped, doubled, swapped, or made strange."""
    made = copy.deepcopy(document)
    path = rng.choice([p for p in places(made) if p])
    parent = made
    for key in path[:-1]:
        parent = parent[key]
    key, others = path[-1], list(parent) if isinstance(parent, dict) else list(range(len(parent)))
    how = rng.randrange(6)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif how == 1:
        parent[f"{key} too"] = copy.deepcopy(parent[key])
    elif how == 2:
        other = rng.choice(others)
        parent[key], parent[other] = parent[other], parent[key]
    elif how == 3 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = rng.choice([parent[key] + 1, parent[key] - 1, -parent[key], parent[key] * 2])
    elif how == 4:
        parent[key] = rng.choice([[parent[key]], str(parent[key]), {"a": parent[key]}])
    else:
        parent[key] = copy.deepcopy(rng.choice(STRANGE))
    return made


def edit_text(text: bytes, rng: random.Random) -> bytes:
    """:func:`edit` for the bytes of a JSON document."""
    return json.dumps(edit(json.loads(text), rng)).encode()


def rearrange(folder: Path, rng: random.Random) -> str:
    """Swap, copy, move or remove files of a folder; what was done."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    a, b = rng.choice(files), rng.choice(files)
    how = rng.choice(["swap", "copy", "move", "remove", "empty", "folder"])
    if how in ("swap", "copy"):
        one, other = a.read_bytes(), b.read_bytes()
        b.write_bytes(one)
        if how == "swap":
            a.write_bytes(other)
    elif how == "move":
        shutil.move(a, b)
    elif how == "empty":
        a.write_bytes(b"")
    else:
        a.unlink()
        if how == "folder":
            a.mkdir()
    return f"{how} {a.relative_to(folder)} {b.relative_to(folder)}"


def each(count: int, seed: int, mutate: Callable[[random.Random], Any]) -> Iterator[tuple[str, Any]]:
    """Some mutants, each with the name of the seed that makes it again."""
    for i in range(count):
        yield f"{seed}/{i}", mutate(random.Random(f"{seed}/{i}"))
