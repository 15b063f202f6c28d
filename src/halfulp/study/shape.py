"""The exact shape of every JSON file of a study, and one function that holds a value against it.

A digest says that a file is the one that was named; it does not say that whoever named it was honest. So each
file is held against its shape when it is read, before anything is believed or a path is made of it: a field
too many or too few, or of another kind, is damage.

A shape is a type; a tuple of the values allowed; a list with the shape of its items; a dict with the shape of
each field (a key that ends in ``?`` may be left out); or something with a ``check`` of its own, below.

>>> check({"n": 1}, {"n": int, "note?": str}, "a.json")
>>> check({"n": "1"}, {"n": int}, "a.json")
Traceback (most recent call last):
...
halfulp.errors.CorruptionError: a.json: n must be of kind int, not "1".
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfulp import canonical
from halfulp.errors import CorruptionError, UsageError
from halfulp.study.protocol import COMPARISONS, SCALES, SCOPES, check_name
from halfulp.study.verdict import check_unit


def check(value: Any, shape: Any, where: str) -> None:
    """Refuse a value that does not have a shape; `where` is named."""
    if isinstance(shape, dict):
        _check_fields(value, shape, where)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise CorruptionError(f"{where} must be a list.")
        for item in value:
            check(item, shape[0], where)
    elif isinstance(shape, tuple):
        if value not in shape or isinstance(value, bool):
            known = ", ".join(str(allowed) for allowed in shape)
            raise CorruptionError(f"{where} is {_short(value)}, not one of {known}.")
    elif isinstance(shape, type):
        kinds = (int, float) if shape is float else (shape,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and shape is not bool):
            raise CorruptionError(f"{where} must be of kind {shape.__name__}, not {_short(value)}.")
    else:
        shape.check(value, where)


def _check_fields(value: Any, shape: dict[str, Any], where: str) -> None:
    known = {key.removesuffix("?"): below for key, below in shape.items()}
    needed = {key for key in shape if not key.endswith("?")}
    found = set(value) if isinstance(value, dict) else set()
    if not isinstance(value, dict) or found - set(known) or needed - found:
        extra, lacking = sorted(found - set(known)), sorted(needed - found)
        raise CorruptionError(
            f"{where} has unknown fields {extra[:5]} and lacks {lacking}: not one that this halfulp writes."
        )
    for key in value:
        check(value[key], known[key], f"{where}: {key}")


def _short(value: Any) -> str:
    text = canonical.dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Text:
    """Text of a kind that a function checks; it raises a UsageError, or gives back False."""

    kind: str
    holds: Callable[[str], bool | None]

    def check(self, value: Any, where: str) -> None:
        try:
            wrong = not isinstance(value, str) or self.holds(value) is False
        except UsageError as error:
            raise CorruptionError(f"{where}: {error}") from None
        if wrong:
            raise CorruptionError(f"{where} must be {self.kind}, not {_short(value)}.")


@dataclass(frozen=True)
class Each:
    """A mapping from any text, or from text of a kind, to values of one shape."""

    shape: Any
    keys: Text | None = None

    def check(self, value: Any, where: str) -> None:
        check(value, dict, where)
        for key, below in value.items():
            if self.keys is not None:
                self.keys.check(key, where)
            check(below, self.shape, f"{where}: {key[:120]}")


@dataclass(frozen=True)
class Maybe:
    """Null, or a value of a shape."""

    shape: Any

    def check(self, value: Any, where: str) -> None:
        if value is not None:
            check(value, self.shape, where)


@dataclass(frozen=True)
class Either:
    """One of two kinds of object, told apart by a field that only the first has."""

    field: str
    first: Any
    second: Any

    def check(self, value: Any, where: str) -> None:
        check(value, self.first if isinstance(value, dict) and self.field in value else self.second, where)


_DIGEST = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}\+00:00")


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text)) and datetime.datetime.fromisoformat(text) is not None
    except ValueError:  # the 31st of February
        return False


MOST_BYTES = 256 << 20
"""Of a file of a study whose size nothing states: a ledger of half a million events. More is not read."""

DIGEST = Text("a SHA-256 in hexadecimal", lambda text: bool(_DIGEST.fullmatch(text)))
BEFORE = Text("a SHA-256 in hexadecimal, or empty", lambda text: not text or bool(_DIGEST.fullmatch(text)))
TIME = Text("a time (UTC, to the millisecond)", _is_time)
NAME = Text("a plain name", lambda text: check_name("declared", text))
UNIT = Text("a plain unit", lambda text: check_unit("of the result", text))
TEXTS = [str]
IDENTITY = {"bytes": int, "sha256": DIGEST}  # of a file

# ---- the files --------------------------------------------------------------------------------------

PROTOCOL: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, "config": dict, "question": str, "units": str,
    "not_claimed": TEXTS, "data": TEXTS, "retries": int, "threads": int,
    "stages": [{"name": NAME, "kind": ("reference", "prediction", "outcome"), "reads": TEXTS, "run": str,
                "cells": [{"name": NAME, "config": dict}], "only_if?": TEXTS, "clocks?": bool}],
    "estimands": [{"name": NAME, "what": str, "compute": str, "args?": dict}],
    "gates": [{"name": NAME, "estimand": NAME, "scope": SCOPES, "comparison": COMPARISONS, "threshold": float,
               "why": str}],
    "rules": [{"label": str, "passed": TEXTS, "failed": TEXTS, "not_run?": TEXTS, "says?": str,
               "recovered?": bool}],
    "evidence?": [{"name": NAME, "study": NAME, "scale": SCALES, "records": TEXTS, "attached": TEXTS,
                   "estimands": TEXTS, "after?": NAME}],
}  # fmt: skip

FILE = {"file": str, "attribute": str, "sha256": DIGEST}
EVIDENCE = {"study": NAME, "scale": SCALES, "closed": DIGEST, "label": str, "promoted": bool}
GIT = Maybe({"commit": str, "dirty": bool})
SEAL: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, "protocol": DIGEST,
    "code": {"version?": str, "package": Each(DIGEST),  # all files with the version, else those behind it
             "study": Either("registered", {"registered": str}, FILE)},
    "data": Each(IDENTITY),
    "environment": {"python": str, "libraries": Each(str), "platform": str, "cpu": str, "cpu_features": str},
    "git": {"package": GIT, "study": GIT},
    "noted?": {"version": str, "files": Each(DIGEST)},
    "evidence?": Each(EVIDENCE, NAME),
}  # fmt: skip

PROCESS = {"pid": int, "start": int, "boot": str, "nonce": str}
ALWAYS: dict[str, Any] = {"n": int, "previous": BEFORE, "at": TIME, "event": str, "digest": DIGEST}
CELL = {"stage": NAME, "cell": NAME}
EVENTS: dict[str, dict[str, Any]] = {  # what an event says, beside what all of them say
    "sealed": {"seal": DIGEST, "process": PROCESS},
    "started": CELL,
    "retried": CELL,  # started again after it failed
    "finished": {**CELL, "record": DIGEST, "process": PROCESS},
    "failed": {**CELL, "error": str},
    "recovered": {**CELL, "record": DIGEST, "reason": str, "process": PROCESS},
    "decided": {"stage": NAME, "authorised": bool, "gates": Each(bool), "process": PROCESS},
    "stage-sealed": {"stage": NAME, "seal": DIGEST, "process": PROCESS},
    "deviation": {"reason": str, "changes": TEXTS, "code": DIGEST, "process": PROCESS},
    "validated": {"result": DIGEST, "process": PROCESS},
    "closed": {"result": DIGEST, "label": str, "process": PROCESS},
}

RECORD: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, **CELL, "config": dict, "protocol": DIGEST, "code": DIGEST,
    "data": DIGEST, "outcome": dict, "attached": Each(IDENTITY, NAME), "origin": ("run", "recovered"),
    "reason": str, "scientific_result": bool,
}  # fmt: skip

STAGE_SEAL: dict[str, Any] = {
    "format": int, "study": NAME, "stage": NAME, "seal": DIGEST, "before": BEFORE,
    "records": Each(DIGEST, NAME),
}  # fmt: skip

GATE_RESULT = {
    "name": str, "estimand": NAME, "scope": SCOPES, "unit": Maybe(UNIT), "value": Maybe(float),
    "comparison": COMPARISONS, "threshold": float, "passed": bool,
}  # fmt: skip
RESULT: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, "seal": DIGEST, "stages": Each(DIGEST, NAME),
    "estimands": Each(Each(Maybe(float), UNIT), NAME), "gates": [GATE_RESULT], "label": str,
    "not_promoted": TEXTS, "scientific_result": bool, "says?": str,
    "decisions?": Each({"authorised": bool, "gates": Each(bool)}, NAME),
}  # fmt: skip

STATEMENT: dict[str, Any] = {
    "_type": str, "subject": [{"name": str, "digest": {"sha256": DIGEST}}], "predicateType": str,
    "predicate": {"study": NAME, "scale": SCALES, "seal": DIGEST, "closed": DIGEST, "gates": Each(bool),
                  "label": str, "scientificResult": bool},
}  # fmt: skip
RETROSPECTIVE: dict[str, Any] = {
    "format": int, "name": NAME, "study": NAME, "why": str, "attribute": str, "analysis": DIGEST,
    "estimands": [{"name": NAME, "what": str, "args?": dict}], "gates": PROTOCOL["gates"],
    "rules": PROTOCOL["rules"],
}  # fmt: skip
