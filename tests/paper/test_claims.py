"""What the paper prints: rows become claims, and a row about nothing is refused."""

from __future__ import annotations

import pytest

from halfulp.errors import UsageError
from halfulp.paper.studies.claims import Beside, ends, over
from halfulp.study import Cell, Estimand, Gate, Rule, Running, Stage, Study
from halfulp.study.protocol import Config, Json, Records, Values


def _cells(config: Config) -> list[Cell]:
    return [Cell(name=name) for name in ("a", "b", "c")]


def _run(cell: Running) -> dict[str, Json]:
    return {"heads": 1}


def heads(records: Records) -> Values:
    """1 for heads."""
    return {name: r["heads"] for name, r in records["toss"].items()}


def also(records: Records) -> dict[str, int]:
    return {"sides": len(set(heads(records).values()))}


def tosses(records: Records) -> int:
    return len(records["toss"])


STUDY = Study(
    name="coin",
    question="Does the coin land on both sides?",
    units="one toss",
    not_claimed=(),
    scales={"smoke": {}},
    stages=(Stage(name="toss", kind="outcome", cells=_cells, run=_run),),
    estimands=(Estimand.of(heads),),
    gates=(Gate.of("both", "heads == 0.5", scope="mean"),),
    rules=(Rule(label="both sides", passed=("both",)), Rule(label="one side")),
)
RECORDS: Records = {"toss": {"a": {"heads": 1}, "b": {"heads": None}, "c": {"heads": 0}}}


def test_rows_become_claims() -> None:
    row = Beside(STUDY, "section 1", "two tosses", units=("a", "b"))
    claims = (
        *row.each("heads, {}", {"a": 1, "b": "none"}, "heads"),
        row("sides", 2, also, "sides", source="section 2", note=""),
        row("tosses", 3, tosses),
        row("heads", "0 to 1", over(ends, "heads")),
        *row.each("heads of {}", (1, 2), over(max, "heads", "{}")),
        row("outcome", "one side", row.label),
    )
    assert [(c.claim, c.source, c.paper, c.ours(RECORDS), c.note) for c in claims] == [
        ("heads, a", "section 1", 1, 1, "two tosses"),
        ("heads, b", "section 1", "none", None, "two tosses"),
        ("sides", "section 2", 2, 3, ""),
        ("tosses", "section 1", 3, 3, "two tosses"),
        ("heads", "section 1", "0 to 1", "0.000 to 1.000", "two tosses"),
        ("heads of a", "section 1", 1, 1, "two tosses"),
        ("heads of b", "section 1", 2, None, "two tosses"),
        ("outcome", "section 1", "one side", "one side", "two tosses"),
    ]
    for what in ("tails", over(sum, "tails")):
        with pytest.raises(UsageError, match="a claim is about 'tails', which it does not compute"):
            row("tails", 0, what)
