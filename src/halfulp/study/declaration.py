"""A study as JSON: what is sealed of it, and the exact shape of every file in its folder.

`declare` turns a :class:`~halfulp.study.protocol.Study` at one scale into JSON: every cell with its config,
every estimand, gate and rule. `Protocol` reads that JSON back. The engine, the workers and the validator take
cells, gates and rules from what was sealed and only the *functions* from code, so code that declares
something else cannot move a gate.

A digest says that a file is the one that was named; it does not say that whoever named it was honest. So each
file is held against its shape when it is read, before anything is believed or a path is made of it: a field
too many or too few, or of another kind, is damage. A shape is a type; a tuple of the values allowed; a list
with the shape of its items; a dict with the shape of each field (a key that ends in ``?`` may be left out);
or a function that raises.

>>> check({"n": 1}, {"n": int, "note?": str}, "a.json")
>>> check({"n": "1"}, {"n": int}, "a.json")
Traceback (most recent call last):
...
halfulp.errors.CorruptionError: a.json: n must be of kind int, not "1".
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study.protocol import (
    COMPARISONS,
    KINDS,
    SCALES,
    SCOPES,
    Estimand,
    Gate,
    Json,
    Rule,
    SealedStage,
    Study,
    check_cells,
    check_decisions,
    check_name,
    check_opened,
    check_stages,
    check_unit,
)

FORMAT = 1
MOST_BYTES = 256 << 20
"""The most that is read of a file whose size is stated nowhere: a ledger of half a million events."""

Check = Callable[[Any, str], None]


def read_known(path: Path, sha256: str, what: str, most: int = MOST_BYTES) -> bytes:
    """Read a file whose digest is known; `what` it must be is named in the error."""
    content = files.read(path, most)
    if canonical.sha256(content) != sha256:
        raise TamperingError(f"{path} is not {what}: its SHA-256 differs.")
    return content


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
        shape(value, where)


def _check_fields(value: Any, shape: dict[str, Any], where: str) -> None:
    known = {key.removesuffix("?"): below for key, below in shape.items()}
    needed = {key for key in shape if not key.endswith("?")}
    present = set(value) if isinstance(value, dict) else set()
    if not isinstance(value, dict) or present - set(known) or needed - present:
        extra, lacking = sorted(present - set(known)), sorted(needed - present)
        raise CorruptionError(
            f"{where} has unknown fields {extra[:5]} and lacks {lacking}: not one that this halfulp writes."
        )
    for key in value:
        check(value[key], known[key], f"{where}: {key}")


def _short(value: Any) -> str:
    text = canonical.dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def text(kind: str, holds: Callable[[str], bool | None]) -> Check:
    """Make the shape of text that a function accepts; it raises a UsageError, or returns False, if not."""

    def checked(value: Any, where: str) -> None:
        try:
            wrong = not isinstance(value, str) or holds(value) is False
        except UsageError as error:
            raise CorruptionError(f"{where}: {error}") from None
        if wrong:
            raise CorruptionError(f"{where} must be {kind}, not {_short(value)}.")

    return checked


def each(shape: Any, keys: Check | None = None) -> Check:
    """Make the shape of a mapping from any text, or from text of a kind, to values of one shape."""

    def checked(value: Any, where: str) -> None:
        check(value, dict, where)
        for key, below in value.items():
            if keys is not None:
                keys(key, where)
            check(below, shape, f"{where}: {key[:120]}")

    return checked


def maybe(shape: Any) -> Check:
    """Make the shape of null, or a value of a shape."""
    return lambda value, where: None if value is None else check(value, shape, where)


def _study_code(value: Any, where: str) -> None:
    registered = isinstance(value, dict) and "registered" in value
    check(value, {"registered": str} if registered else FILE, where)


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text)) and datetime.datetime.fromisoformat(text) is not None
    except ValueError:  # the 31st of February
        return False


_DIGEST = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}\+00:00")

DIGEST = text("a SHA-256 in hexadecimal", lambda text: bool(_DIGEST.fullmatch(text)))
BEFORE = text("a SHA-256 in hexadecimal, or empty", lambda text: not text or bool(_DIGEST.fullmatch(text)))
TIME = text("a time (UTC, to the millisecond)", _is_time)
NAME = text("a plain name", lambda text: check_name("declared", text))
UNIT = text("a plain unit", lambda text: check_unit("of the result", text))
TEXTS = [str]
IDENTITY = {"bytes": int, "sha256": DIGEST}  # of a file

# ---- the files --------------------------------------------------------------------------------------

PROTOCOL: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, "config": dict, "question": str, "units": str,
    "not_claimed": TEXTS, "data": TEXTS, "retries": int, "threads": int,
    "stages": [{"name": NAME, "kind": KINDS, "reads": TEXTS, "run": str,
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
GIT = maybe({"commit": str, "dirty": bool})
SEAL: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, "protocol": DIGEST,
    "code": {"version?": str, "package": each(DIGEST),  # all files with the version, else those behind it
             "study": _study_code},
    "data": each(IDENTITY),
    "environment": {"python": str, "libraries": each(str), "platform": str, "cpu": str, "cpu_features": str,
                    "gpus?": TEXTS, "gpu_settings?": each(str)},
    "git": {"package": GIT, "study": GIT},
    "noted?": {"version": str, "files": each(DIGEST)},
    "evidence?": each(EVIDENCE, NAME),
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
    "decided": {"stage": NAME, "authorised": bool, "gates": each(bool), "process": PROCESS},
    "stage-sealed": {"stage": NAME, "seal": DIGEST, "process": PROCESS},
    "deviation": {"reason": str, "changes": TEXTS, "code": DIGEST, "process": PROCESS},
    "validated": {"result": DIGEST, "process": PROCESS},
    "closed": {"result": DIGEST, "label": str, "process": PROCESS},
}

RECORD: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, **CELL, "config": dict, "protocol": DIGEST, "code": DIGEST,
    "data": DIGEST, "outcome": dict, "attached": each(IDENTITY, NAME), "origin": ("run", "recovered"),
    "reason": str, "scientific_result": bool,
}  # fmt: skip

STAGE_SEAL: dict[str, Any] = {
    "format": int, "study": NAME, "stage": NAME, "seal": DIGEST, "before": BEFORE,
    "records": each(DIGEST, NAME),
}  # fmt: skip

GATE_RESULT = {
    "name": str, "estimand": NAME, "scope": SCOPES, "unit": maybe(UNIT), "value": maybe(float),
    "comparison": COMPARISONS, "threshold": float, "passed": bool,
}  # fmt: skip
RESULT: dict[str, Any] = {
    "format": int, "study": NAME, "scale": SCALES, "seal": DIGEST, "stages": each(DIGEST, NAME),
    "estimands": each(each(maybe(float), UNIT), NAME), "gates": [GATE_RESULT], "label": str,
    "not_promoted": TEXTS, "scientific_result": bool, "says?": str,
    "decisions?": each({"authorised": bool, "gates": each(bool)}, NAME),
}  # fmt: skip

STATEMENT: dict[str, Any] = {
    "_type": str, "subject": [{"name": str, "digest": {"sha256": DIGEST}}], "predicateType": str,
    "predicate": {"study": NAME, "scale": SCALES, "seal": DIGEST, "closed": DIGEST, "gates": each(bool),
                  "label": str, "scientificResult": bool},
}  # fmt: skip
RETROSPECTIVE: dict[str, Any] = {
    "format": int, "name": NAME, "study": NAME, "why": str, "attribute": str, "analysis": DIGEST,
    "estimands": [{"name": NAME, "what": str, "args?": dict}], "gates": PROTOCOL["gates"],
    "rules": PROTOCOL["rules"],
}  # fmt: skip


# ---- what a study declares --------------------------------------------------------------------------


def declare(study: Study, scale: str) -> dict[str, Json]:
    """Return everything of a study that is not a function, at one scale."""
    stages = []
    for stage in study.stages:
        cells = [{"name": cell.name, "config": cell.config} for cell in study.cells(scale, stage.name)]
        stages.append(
            {"name": stage.name, "kind": stage.kind, "reads": list(stage.reads), "run": _called(stage.run),
             "cells": cells, **_given(only_if=list(stage.only_if), clocks=stage.clocks)}
        )  # fmt: skip
    estimands = [
        {"name": e.name, "what": e.what, "compute": _called(e.compute), **declared_args(e)}
        for e in study.estimands
    ]
    evidence = []
    for one in study.evidence:
        entry = asdict(one) | {"scale": one.scale or scale}
        evidence.append(entry | _given(after=entry.pop("after")))
    return {
        "format": FORMAT, "study": study.name, "scale": scale, "config": study.config(scale),
        "question": study.question, "units": study.units, "not_claimed": list(study.not_claimed),
        "data": [*study.data, *study.scale_data.get(scale, ())], "retries": study.retries,
        "threads": study.threads, "stages": stages, "estimands": estimands,
        "gates": [asdict(gate) for gate in study.gates],
        "rules": [declared_rule(rule) for rule in study.rules], **_given(evidence=evidence),
    }  # fmt: skip


def declared_rule(rule: Rule) -> dict[str, Json]:
    """Return a rule, as it is sealed."""
    gates = {"label": rule.label, "passed": list(rule.passed), "failed": list(rule.failed)}
    return gates | _given(not_run=list(rule.not_run), says=rule.says, recovered=rule.recovered)


def declared_args(estimand: Estimand) -> dict[str, Json]:
    """Return the arguments of an estimand, as they are sealed, if it has any."""
    return _given(args={key: sealed_argument(value) for key, value in estimand.args.items()})


def sealed_argument(value: Json) -> Json:
    """Return an estimand's argument, as it is sealed: a function is called by its name."""
    return {"function": _called(value)} if callable(value) else value


def _given(**fields: Json) -> dict[str, Json]:
    """Leave out fields that say nothing, so that a study which needs none of them stays as it was."""
    return {key: value for key, value in fields.items() if value}


def _called(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


class Protocol:
    """A declaration that was read back, strictly; `where` is named in errors."""

    def __init__(self, content: Any, where: str) -> None:
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise CorruptionError(
                f"{where} has format {str(content['format'])[:40]!a}; this halfulp reads format {FORMAT}."
            )
        check(content, PROTOCOL, where)
        self.content: dict[str, Json] = content
        self.study: str = content["study"]
        self.scale: str = content["scale"]
        self.threads: int = content["threads"]
        self.retries: int = content["retries"]
        self.data: tuple[str, ...] = tuple(content["data"])
        self.estimands: tuple[str, ...] = tuple(e["name"] for e in content["estimands"])
        self.args: dict[str, dict[str, Json]] = {e["name"]: e.get("args", {}) for e in content["estimands"]}
        self.evidence: tuple[dict[str, Json], ...] = tuple(content.get("evidence", ()))
        self.stages = tuple(
            SealedStage(
                s["name"], s["kind"], tuple(s["reads"]), {c["name"]: c["config"] for c in s["cells"]},
                tuple(s.get("only_if", ())), s.get("clocks", False),
            )
            for s in content["stages"]
        )  # fmt: skip
        try:
            self.gates = tuple(Gate(**gate) for gate in content["gates"])
            self.rules = tuple(Rule(**_sealed_rule(rule)) for rule in content["rules"])
            check_stages("The study", self.stages)
            for stage in content["stages"]:
                check_cells(stage["name"], [cell["name"] for cell in stage["cells"]])
            check_decisions("The study", self.estimands, self.gates, self.rules, self.stages)
            for one in self.evidence:
                check_opened(f"Evidence {one['name']}", one.get("after", ""), self.stages)
        except UsageError as error:
            raise CorruptionError(f"{where} is not a protocol: {error}") from None
        if not self.stages or self.threads < 1 or self.retries < 0:
            raise CorruptionError(f"{where} is not a protocol: it has no stage, or no thread to run one.")

    @classmethod
    def of(cls, study: Study, scale: str) -> Protocol:
        """Return the protocol of a study as its code declares it now, as it would be read back."""
        content = canonical.dumps(declare(study, scale))
        return cls(canonical.loads(content, f"study {study.name}"), f"study {study.name}")

    @cached_property
    def on_gpu(self) -> bool:
        """True if a cell's config names a GPU as its device: ``auto``, where there is one, or ``cuda``."""
        return any(_names_gpu(config) for stage in self.stages for config in stage.cells.values())

    @cached_property
    def bytes(self) -> bytes:
        """The canonical form."""
        return canonical.dumps(self.content)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form."""
        return canonical.sha256(self.bytes)

    def stage(self, name: str) -> SealedStage:
        """Return a stage by name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UsageError(f"Study {self.study} has no stage {name!r}.")

    def before(self, name: str) -> tuple[SealedStage, ...]:
        """Return the stages that must be sealed before this one starts."""
        names = [stage.name for stage in self.stages]
        return self.stages[: names.index(self.stage(name).name)]

    def judged_from(self, estimand: str) -> tuple[str, ...]:
        """Return the stages whose records an estimand is given: all, or those before the first it decides on.

        So a gate that decides whether a stage runs has one value, then and at the end.
        """
        gates = {gate.name for gate in self.gates if gate.estimand == estimand}
        for i, stage in enumerate(self.stages):
            if gates & {name.partition("[")[0] for name in stage.only_if}:
                return tuple(earlier.name for earlier in self.stages[:i])
        return tuple(stage.name for stage in self.stages)

    def cell(self, name: str) -> tuple[str, str]:
        """Return stage and cell of ``stage/cell``, or of a cell's name that only one stage has."""
        stage, _, cell = name.rpartition("/")
        stages = [s.name for s in self.stages if cell in s.cells and stage in ("", s.name)]
        if len(stages) != 1:
            problem = "no" if not stages else "more than one"
            raise UsageError(f"Study {self.study} has {problem} cell {name[:120]!a}; name it as stage/cell.")
        return stages[0], cell


def _names_gpu(config: Json) -> bool:
    if isinstance(config, Mapping):
        named = config.get("device")
        return named == "auto" or str(named).startswith("cuda") or any(map(_names_gpu, config.values()))
    return isinstance(config, list) and any(map(_names_gpu, config))


def _sealed_rule(rule: Mapping[str, Json]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in rule.items()}


def changes(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield what differs between two JSON values, one line per place; list items go by their names."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            below = f"{path}.{key}" if path else key
            if key not in old:
                yield f"{below}: added, {_short(new[key])}"
            elif key not in new:
                yield f"{below}: gone, was {_short(old[key])}"
            else:
                yield from changes(old[key], new[key], below)
    elif _named(old) and _named(new):
        yield from changes({i["name"]: i for i in old}, {i["name"]: i for i in new}, path)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield f"{path}: was {_short(old)}, now {_short(new)}"


def _named(items: Any) -> bool:
    return isinstance(items, list) and items != [] and all(isinstance(i, dict) and "name" in i for i in items)
