"""An analysis that was thought of after the outcomes: its own declaration, folder and label.

It reads the records of a closed study and can change nothing there. Its label begins with
``retrospective:``, and its result names the registered study by its digests and states the registered
label, so the two cannot be mistaken for one another. It is not sealed, because there is nothing left to
forecast; it can be recomputed, byte by byte, from the study and the analysis file beside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study import loading, result, shape
from halfulp.study.declaration import FORMAT, declared_args, declared_rule
from halfulp.study.protocol import Estimand, Gate, Json, Rule, check_decisions, check_name
from halfulp.study.reading import open_closed
from halfulp.study.store import Store
from halfulp.study.verdict import evaluate, judge

DECLARATION, ANALYSIS, RESULT = "retrospective.json", "analysis.py", "result.json"


@dataclass(frozen=True, kw_only=True)
class Retrospective:
    """Estimands, gates and rules over the records of a study that is over; `why` says what for."""

    name: str
    study: str
    why: str
    estimands: tuple[Estimand, ...]
    gates: tuple[Gate, ...]
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        check_name("retrospective", self.name)
        if not self.why.strip():
            raise UsageError(f"Retrospective {self.name} must say why it is made.")
        estimands = [estimand.name for estimand in self.estimands]
        check_decisions(f"Retrospective {self.name}", estimands, self.gates, self.rules)


def retrospect(out: Path, content: bytes, name: str, folder: Path, attribute: str = "") -> dict[str, Json]:
    """Analyse a closed study with a file's `Retrospective`, into `folder`; gives the result."""
    if folder.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{folder} is inside the registered study, which an analysis must not touch.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already. Choose another folder for the analysis.")
    made = analyse(out, content, name, attribute)
    for file, bytes_ in made.items():
        files.put(folder / file, bytes_, folder / "work")
    files.remove_tree(folder / "work")
    value: dict[str, Json] = canonical.loads(made[RESULT], folder / RESULT)
    return value


def analyse(out: Path, content: bytes, name: str, attribute: str = "") -> dict[str, bytes]:
    """The files of an analysis; the last of them is the result."""
    module = loading.module(content, name)
    attribute, analysis = loading.find(
        module, name, attribute, Retrospective, ("retrospective", "RETROSPECTIVE")
    )
    opened = open_closed(out)
    assert opened.result is not None
    protocol = opened.protocol
    if analysis.study != protocol.study:
        raise UsageError(f"{name} analyses study {analysis.study}, but {out} is study {protocol.study}.")
    values = evaluate(analysis.estimands, opened.records)
    decision = judge(analysis.gates, analysis.rules, values)
    declaration = canonical.dumps(
        {
            "format": FORMAT,
            "name": analysis.name,
            "study": analysis.study,
            "why": analysis.why,
            "attribute": attribute,
            "analysis": canonical.sha256(content),
            "estimands": [{"name": e.name, "what": e.what, **declared_args(e)} for e in analysis.estimands],
            "gates": [asdict(gate) for gate in analysis.gates],
            "rules": [declared_rule(rule) for rule in analysis.rules],
        }
    )
    computed = canonical.dumps(
        {
            "format": FORMAT,
            "retrospective": canonical.sha256(declaration),
            "registered": {
                "study": protocol.study,
                "scale": protocol.scale,
                "seal": opened.events.seal,
                "closed": opened.digest,
                "label": opened.result["label"],
            },
            "estimands": values,
            "gates": result.gates_json(decision),
            "label": f"retrospective: {decision.label}",
            "scientific_result": False,
        }
    )
    return {ANALYSIS: content, DECLARATION: declaration, RESULT: computed}


def check(folder: Path, out: Path) -> dict[str, Json]:
    """Recompute an analysis from the registered study; gives its result, or names the file that differs."""
    content = files.read(folder / DECLARATION, shape.MOST_BYTES)
    declared = canonical.loads(content, folder / DECLARATION)
    shape.check(declared, shape.RETROSPECTIVE, str(folder / DECLARATION))
    content = files.read(folder / ANALYSIS, shape.MOST_BYTES)
    if canonical.sha256(content) != declared["analysis"]:
        raise TamperingError(
            f"{folder / ANALYSIS} is not the file that {DECLARATION} names: its SHA-256 differs."
        )
    try:
        made = analyse(out, content, ANALYSIS, declared["attribute"])
    except UsageError as error:
        raise TamperingError(f"{folder / DECLARATION} does not fit {ANALYSIS} and {out}: {error}") from None
    for file, expected in made.items():
        if files.read(folder / file, shape.MOST_BYTES) != expected:
            raise TamperingError(
                f"{folder / file} does not follow from the analysis and the records in {out}."
            )
    extra = sorted(Store(folder).present() - set(made))
    if extra:
        raise CorruptionError(f"{folder / extra[0]} does not belong to the analysis.")
    value: dict[str, Json] = canonical.loads(made[RESULT], folder / RESULT)
    return value
