"""Canonical JSON (RFC 8785): one value, one sequence of bytes, in any language.

Keys are sorted by their UTF-16 code units, numbers are written as ECMAScript writes a double, strings are
UTF-8 with the fewest escapes, and there is no space. ``json.dumps(sort_keys=True)`` differs in all three:
it sorts by code point, writes ``1.0`` and ``1e-07``, and lets NaN through.

Consequences for a record: ``1.0`` and ``1`` are the same number, so are ``-0.0`` and ``0``; integers beyond
2**53 - 1 are refused, because a double cannot hold all of them: write them as text.

>>> dumps({"b": 1.0, "a": [1e-7, 1e21, None]})
b'{"a":[1e-7,1e+21,null],"b":1}'
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from halfulp.errors import CorruptionError, UsageError

LARGEST = 2**53 - 1
DEPTH = 100


def dumps(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value."""
    parts: list[str] = []
    _write(value, parts, "value", 0)
    try:
        return "".join(parts).encode()
    except UnicodeEncodeError:
        raise UsageError("Text with half a surrogate pair has no canonical form.") from None


def loads(content: bytes, where: str | Path) -> Any:
    """Return the value of canonical bytes; bytes in any other form are refused, and `where` is named."""
    try:
        value = parse(content)
        same = dumps(value) == content
    except (ValueError, RecursionError):  # of which UnicodeDecodeError and UsageError are kinds
        raise CorruptionError(f"{where} is damaged: it is not canonical JSON.") from None
    if not same:
        raise CorruptionError(
            f"{where} is damaged or was edited: its JSON is not in the canonical form that was written."
        )
    return value


def parse(content: bytes | str) -> Any:
    """Return the value of JSON in any form; large doubles, which look like integers, are read as doubles."""
    text = content.decode() if isinstance(content, bytes) else content
    try:
        value = json.loads(text, parse_int=_integer, parse_constant=_refuse)
        if "\\u" in text:  # half a surrogate pair, which no file, table or terminal takes
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value


def digest(value: Any) -> str:
    """SHA-256 of the canonical bytes."""
    return sha256(dumps(value))


def sha256(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def number(value: float) -> str:
    """Return a double as ECMAScript's ``Number.prototype.toString`` writes it.

    Both languages print the shortest decimal that reads back as the same double. They differ only in which
    magnitudes have an exponent.

    >>> [number(x) for x in (0.1, -0.0, 1e20, 1e21, 1e-6, 1.5e-7)]
    ['0.1', '0', '100000000000000000000', '1e+21', '0.000001', '1.5e-7']
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        raise UsageError(f"{float(value)} is not JSON: use None for a number that is missing or not finite.")
    text = repr(float(value)).removesuffix(".0")
    if 1e-6 <= abs(value) < 1e21:
        return f"{Decimal(text):f}" if "e" in text else text
    return text.replace("e-0", "e-")  # ECMAScript does not pad exponents


def _write(value: Any, parts: list[str], where: str, depth: int) -> None:
    kind = type(value)
    if isinstance(value, str):
        parts.append(encode_basestring(value))
    elif isinstance(value, float):
        parts.append(_located(value, where))
    elif value is None or kind is bool:
        parts.append("null" if value is None else "true" if value else "false")
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            raise UsageError(
                f"{where}: {value} is beyond 2**53 - 1, which JSON numbers cannot all hold: use text."
            )
        parts.append(str(int(value)))
    elif depth >= DEPTH:
        raise UsageError(f"{where} is nested more than {DEPTH} deep.")
    elif isinstance(value, Mapping):
        try:
            keys = sorted(value) if "".join(value).isascii() else sorted(value, key=_utf16)
        except TypeError:
            key = next(key for key in value if not isinstance(key, str))
            raise UsageError(f"{where}: the key {key!a} is not text.") from None
        parts.append("{")
        for i, key in enumerate(keys):
            parts.append(("," if i else "") + encode_basestring(key) + ":")
            _write(value[key], parts, f"{where}.{key}" if depth < 4 else where, depth + 1)
        parts.append("}")
    elif isinstance(value, list | tuple):
        parts.append("[")
        for i, item in enumerate(value):
            if i:
                parts.append(",")
            _write(item, parts, where, depth + 1)
        parts.append("]")
    else:
        raise UsageError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which is not JSON: give None, bool, int, "
            "float, str, or lists and dicts of them (float(x) for a NumPy or torch scalar)."
        )


def _located(value: float, where: str) -> str:
    try:
        return number(value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def _integer(text: str) -> int | float:
    value = int(text) if len(text) < 400 else math.inf
    return value if abs(value) <= LARGEST else float(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)
