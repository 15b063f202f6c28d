"""Forged studies: a forger who knows every format edits a closed study, and a validator looks at it.

What contradicts something else in the folder is noticed from the folder alone. A study that was made up *as
a whole*, with every digest above a forged number computed anew, contradicts nothing: it takes a witness from
outside (the digest that was printed when the study was closed), or running its cells again. A forgery is
lost when what should notice it does not, and also when one is noticed that the page says cannot be: then
the page is wrong.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from study.forging import chain, events, forge, load
from study.samples import NEXT, SMALL, quick_identity, run, study_file

from halfulp import canonical
from halfulp.errors import HalfulpError
from halfulp.study.store import Binding
from halfulp.study.validate import validate
from torture import Clock, Effort, Trial

ARM, OTHER = "records/outcome/arm-1.json", "records/outcome/arm-2.json"
SEED = 0.01  # what a forger adds to a number


def _raised(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = load(out / ARM)
    record["outcome"]["value"] += SEED
    return record


def edited(out: Path) -> None:
    (out / ARM).write_bytes(canonical.dumps(_raised(out)))


def digests_made_right(out: Path) -> None:
    forge(out, ARM, _raised(out))


def records_swapped(out: Path) -> None:
    one, two = load(out / ARM), load(out / OTHER)
    forge(out, ARM, two)
    forge(out, OTHER, one)


def outcomes_swapped(out: Path) -> None:
    one, two = load(out / ARM), load(out / OTHER)
    one["outcome"], two["outcome"] = two["outcome"], one["outcome"]
    forge(out, ARM, one)
    forge(out, OTHER, two)


def attached_replaced(out: Path) -> None:
    (out / "attached/outcome/arm-1/trace.bin").write_bytes(b"another trace")


def threshold_moved(out: Path) -> None:
    protocol = load(out / "protocol.json")
    protocol["gates"][0]["threshold"] = 0.3
    forge(out, "protocol.json", protocol)


def label_changed(out: Path) -> None:
    forge(out, "result.json", load(out / "result.json") | {"label": "not close"})


def of_another_protocol(out: Path) -> None:
    beside = out.parent / "another"
    run(study_file(beside, SMALL.replace("threshold=0.15", "threshold=0.25")), beside / "out")
    forge(out, ARM, load(beside / "out" / ARM))


def end_cut_off(out: Path) -> None:
    chain(out, events(out)[:-1])


def attempt_left_out(out: Path) -> None:
    chain(out, [event for event in events(out) if event.get("cell") != "arm-2"], renumber=True)


def evidence_edited(out: Path) -> None:
    path = out / "evidence/first" / ARM
    record = load(path)
    record["outcome"]["value"] += SEED
    path.write_bytes(canonical.dumps(record))


def evidence_replaced(out: Path) -> None:
    beside, held = out.parent / "beside", out / "evidence/first"
    run(study_file(beside, SMALL.replace('"forecast": 0.2', '"forecast": 0.25')), beside / "out")
    for path in [p for p in held.rglob("*") if p.is_file()]:
        shutil.copy(beside / "out" / path.relative_to(held), path)


def made_up(out: Path) -> None:
    """Run the study again with numbers of the forger's own: everything follows from them."""
    honest = Binding.record

    def record(*given: Any, **more: Any) -> Any:
        made = honest(*given, **more)
        if made["stage"] == "outcome" and made["outcome"]:
            made["outcome"] = made["outcome"] | {"value": made["outcome"]["value"] + SEED}
        return made

    shutil.rmtree(out)
    with mock.patch.object(Binding, "record", record):
        run(study_file(out.parent), out)


def rolled_back_and_run_on(out: Path) -> None:
    """Take the last stage back, records and all, and run it once more."""
    told = events(out)
    chain(out, told[: next(n for n, event in enumerate(told) if event.get("stage") == "outcome")])
    for name in ("records/outcome", "attached/outcome"):
        shutil.rmtree(out / name)
    for name in ("result.json", "seals/outcome.json"):
        (out / name).unlink()
    run(study_file(out.parent), out)


Forgery = Callable[[Path], None]
FOLDER, REPLAY, DIGEST = "the folder alone", "running cells again", "the closing digest"
FORGERIES: dict[str, tuple[Forgery, set[str]]] = {
    "a number in a record": (edited, {FOLDER}),
    "a number in a record, all digests and the ledger made right": (digests_made_right, {FOLDER}),
    "two records, each in the other's place": (records_swapped, {FOLDER}),
    "two outcomes, each in the other's record": (outcomes_swapped, {FOLDER}),
    "an attached file": (attached_replaced, {FOLDER}),
    "a sealed threshold, all digests made right": (threshold_moved, {FOLDER}),
    "the label": (label_changed, {FOLDER}),
    "a record of another protocol": (of_another_protocol, {FOLDER}),
    "a ledger without its end": (end_cut_off, {FOLDER}),
    "a ledger without an attempt": (attempt_left_out, {FOLDER}),
    "a number in the evidence": (evidence_edited, {FOLDER}),
    "evidence of another closed study": (evidence_replaced, {FOLDER}),
    "a study made up as a whole": (made_up, {REPLAY, DIGEST}),
    "a stage taken back and run once more": (rolled_back_and_run_on, {DIGEST}),
}
"""What is forged, by whom, and which witnesses notice it: one that notices nothing by itself is left out."""


def witnesses(out: Path, digest: str) -> set[str]:
    """Who notices that this is not the study whose closing digest is given."""
    looks: dict[str, Callable[[], Any]] = {
        FOLDER: lambda: validate(out),
        REPLAY: lambda: validate(out, replay=[], workers=1),
        DIGEST: lambda: validate(out, expect=digest),
    }
    return {name for name, look in looks.items() if _refuses(look)}


def _refuses(look: Callable[[], Any]) -> bool:
    try:
        return bool(look().exit_code)
    except HalfulpError:
        return True


def trials(effort: Effort) -> Iterator[Trial]:
    """Yield a row per forgery: lost if a witness is silent, or speaks though the table says it cannot."""
    quick_identity()
    whole = effort.folder / "whole"
    run(study_file(whole), whole / "out")
    beside = effort.folder / "next"
    run(study_file(beside, NEXT, "next.py"), beside / "out", evidence={"first": whole / "out"})
    for what, (forgery, expected) in FORGERIES.items():
        if not effort.wants(what):
            continue
        clock = Clock()
        folder = effort.folder / forgery.__name__
        shutil.copytree(beside if what.endswith(("evidence", "closed study")) else whole, folder)
        digest = events(folder / "out")[-1]["digest"]
        forgery(folder / "out")
        noticed = witnesses(folder / "out", digest)
        # what the folder contradicts, every look at it notices
        wrong = noticed ^ (expected if FOLDER not in expected else {FOLDER, REPLAY, DIGEST})
        by = " or ".join(sorted(expected))
        yield Trial("Forged", what, 1, len(wrong), clock(), f"noticed by {by}")
