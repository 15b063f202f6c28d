"""Write JSON documents with their own digest, and read their values by type.

A document has a key ``sha256``: the digest of the canonical form (RFC 8785) of all the rest. So its layout is
free, and any other change is detected. A digest detects damage and careless edits. It is no signature: a file
that is changed on purpose can be given a new one.

:class:`Fields` returns values of the expected type and range, or raises an error with the actual value. Every
reader of manifests, parts, masks and checkpoints uses it, also where an old format has no digest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from halfulp import canonical
from halfulp.errors import RESTORE, CorruptionError, TamperingError
from halfulp.text import shown

DIGEST = "sha256"
MOST_BYTES = 64 << 20
"""Largest size of a document; a manifest of a hundred thousand tensors has some 20 MB."""
T = TypeVar("T")


def sealed(document: Mapping[str, Any]) -> bytes:
    """Return a document with its digest, laid out for people.

    >>> print(sealed({"kind": "example"}).decode(), end="")
    {
     "kind": "example",
     "sha256": "1225823a37dc3a3f61268c5eb889c7c0fbdd4c811871795d51a46bdefee73372"
    }
    """
    stated = {**document, DIGEST: canonical.digest(document)}
    return (json.dumps(stated, indent=1, sort_keys=True) + "\n").encode()


def parsed(content: bytes | str, where: str | Path, what: str, *, exact: bool = False) -> dict[str, Any]:
    """Return the JSON object in a text, or refuse it; ``exact`` keeps integers of any size."""
    try:
        document = json.loads(content) if exact else canonical.parse(content)
    except (ValueError, RecursionError, OverflowError) as error:
        why = f"it is not valid JSON ({shown(str(error), 120)})"
        raise CorruptionError(f"{where} is not {what}: {why}.") from None
    if not isinstance(document, dict):
        raise CorruptionError(f"{where} is not {what}: it is not a JSON object.")
    return document


def check_keys(content: bytes | str, where: str | Path) -> None:
    """Refuse JSON with a key twice in one object: readers use one of the two, and the digest covers only one.

    >>> check_keys('{"a": 1, "b": {"a": 2}}', "a.json")
    >>> check_keys('{"a": 1, "a": 2}', "a.json")
    Traceback (most recent call last):
    ...
    halfulp.errors.CorruptionError: a.json is damaged: the key a is there twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        twice = [key for key, times in Counter(keys).items() if times > 1]
        if twice:
            raise CorruptionError(f"{where} is damaged: the key {shown(twice[0])} is there twice.")

    json.loads(content, object_pairs_hook=once)


def check_digest(document: Mapping[str, Any], where: str | Path) -> None:
    """Refuse a document whose digest is not that of its content."""
    rest = {key: value for key, value in document.items() if key != DIGEST}
    try:
        actual = canonical.digest(rest)
    except (ValueError, RecursionError) as error:  # of which UsageError is a kind
        raise CorruptionError(f"{where} is damaged: {error}") from None
    if document.get(DIGEST) != actual:
        raise TamperingError(
            f"{where} is not what was written: its SHA-256 differs from the one that it states. {RESTORE}"
        )


class Fields:
    """The values of a JSON object, checked for type and range."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise CorruptionError(f"{where} is {_short(values)}, expected a JSON object.")
        self.values, self.where = values, where

    def take(self, key: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        """Return a value that fits, or raise an error that says what was expected."""
        if key not in self.values:
            raise CorruptionError(f"{self.where} is not whole: it has no {key}.")
        value = self.values[key]
        if not fits(value):
            raise CorruptionError(f"{self.where}: {key} is {_short(value)}, expected {expected}.")
        return value

    def text(self, key: str, most: int = 100_000) -> str:
        """Take a text of at most ``most`` characters."""
        return str(self.take(key, "text", lambda v: isinstance(v, str) and len(v) <= most))

    def flag(self, key: str) -> bool:
        """Take a boolean."""
        return bool(self.take(key, "true or false", lambda v: isinstance(v, bool)))

    def whole(self, key: str, low: int = 0, high: int = canonical.LARGEST) -> int:
        """Take a whole number from ``low`` to ``high``."""
        return int(self.take(key, f"a whole number from {low} to {high}", lambda v: whole(v, low, high)))

    def sha256(self, key: str) -> str:
        """Take a SHA-256 in hexadecimal."""
        return str(self.take(key, "a SHA-256 in hexadecimal", is_sha256))

    def texts(self, key: str, most: int = 10_000) -> list[str]:
        """Take a list of at most ``most`` texts."""
        return list(self.take(key, "a list of text", lambda v: listed(v, str, most)))

    def wholes(self, key: str, most: int) -> list[int]:
        """Take a list of at most ``most`` whole numbers from 0."""
        expected = f"a list of at most {most} whole numbers from 0"
        return list(self.take(key, expected, lambda v: listed(v, int, most) and all(whole(x) for x in v)))

    def within(self, key: str) -> Fields:
        """Return the fields of an object in this one."""
        return Fields(self.take(key, "a JSON object", lambda v: isinstance(v, dict)), f"{self.where}: {key}")

    def each(self, key: str, most: int = 1_000_000) -> Iterator[Fields]:
        """Return the fields of every object in a list."""
        objects = self.take(key, "a list of JSON objects", lambda v: listed(v, dict, most))
        return (Fields(value, f"{self.where}: {key}[{i}]") for i, value in enumerate(objects))


def whole(value: Any, low: int = 0, high: int = canonical.LARGEST) -> bool:
    """Return True if a value is an integer of a range; True and 1.0 are not."""
    return type(value) is int and low <= value <= high


def listed(value: Any, kind: type, most: int) -> bool:
    """Return True if a value is a list of one kind, and not too long."""
    return isinstance(value, list) and len(value) <= most and all(isinstance(v, kind) for v in value)


def is_sha256(value: Any) -> bool:
    """Return True for 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")


def _short(value: Any) -> str:
    return shown(repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}")
