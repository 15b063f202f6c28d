"""What is silenced, and why: ``noqa``, ``type: ignore``, skipped tests and expected failures, on the page.

A reason stands behind the mark, in the call that skips, or here for a whole kind of marks; one without any is
lost. A test that is skipped says what is missing, so that it cannot be skipped in silence.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from torture import PAGE, ROOT, Clock, Effort, Trial

FOLDERS = ("src", "tests", "examples", "benchmarks")
BEGIN, END = "<!-- silenced: begin -->", "<!-- silenced: end -->"
MARK = re.compile(r"#\s*(noqa|type: ignore)(?:: ?([A-Z0-9, ]+)|\[([a-z, -]+)\])?\s*(?:#\s*(.*))?$")
SKIPS = ("skip", "skipif", "importorskip", "xfail")
REASONS = {
    "arg-type": "another type than is declared: the mistake under test, or a stand-in that has enough",
    "assignment": "replaced for a while",
    "attr-defined": "the object has it, the declared type does not",
    "B008": "the default is frozen",
    "call-arg": "the mistake under test",
    "index": "a value that is there, as the lines before make sure",
    "E402": "after a test is skipped for want of a library",
    "E731": "a rule as users write it",
    "F401": "imported for what it prepares",
    "method-assign": "replaced for a while",
    "misc": "a class that is known when the program runs",
    "no-untyped-call": "torch's function has no types",
    "NPY002": "the global generator is what is looked at",
    "operator": "a value that is there, as the lines before make sure",
    "override": "a signature as others write it",
    "S102": "a program of the tests' own",
    "SIM118": "safetensors' handle is no mapping",
    "union-attr": "a value that is there, as the lines before make sure",
}

Found = tuple[str, str]  # what is silenced, and the reason


def marks(text: str) -> Iterator[Found]:
    """Yield every mark in the comments of a file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        found = MARK.search(token.string) if token.type == tokenize.COMMENT else None
        if found is None:
            continue
        codes = re.split(r", *", (found[2] or found[3] or "everything").strip())
        reason = (found[4] or "").strip() or next((REASONS[c] for c in codes if c in REASONS), "")
        yield f"`{found[1]}` {', '.join(codes)}", reason


def skips(text: str) -> Iterator[Found]:
    """Yield every test that may be skipped or fail. What cannot be imported is its own reason."""
    for node in ast.walk(ast.parse(text)):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SKIPS
        ):
            continue
        named = [k.value for k in node.keywords if k.arg == "reason"]
        given = named or (node.args[:1] if node.func.attr in ("skip", "importorskip") else [])
        reason = ast.unparse(given[0]).strip("'\"") if given else ""
        if node.func.attr == "importorskip" and not named:
            reason = f"needs {reason}"
        yield f"`{node.func.attr}`", re.sub(r"\{.*?\}", "...", reason.removeprefix("f'").removeprefix('f"'))


def everything(root: Path = ROOT) -> list[Found]:
    """Return all that is silenced in the repository."""
    found: list[Found] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text()
            found += marks(text)
            found += skips(text) if folder == "tests" else ()
    return found


def table(found: list[Found]) -> str:
    """Return the section of the page: each kind, how often, and the reasons with their counts."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, reason in found:
        by_kind[kind][reason or "**none**"] += 1
    lines = ["| silenced | times | why |", "|---|---:|---|"]
    for kind, reasons in sorted(by_kind.items()):
        why = "; ".join(f"{r} ({n})" if n > 1 else r for r, n in sorted(reasons.items()))
        lines.append(f"| {kind} | {reasons.total()} | {why.replace('|', '/')} |")
    return "\n".join(lines)


def trials(effort: Effort) -> Iterator[Trial]:
    """Write the section, and yield a row: lost is what has no reason."""
    clock, found = Clock(), everything()
    text = PAGE.read_text()
    if BEGIN in text:
        head, rest = text.split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")
    without = sum(not reason for _, reason in found)
    yield Trial("Silenced", "`noqa`, `type: ignore`, skips", len(found), without, clock(), "listed below")
