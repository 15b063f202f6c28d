"""Tables of what the paper prints: rows become claims, and a row about nothing is refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from halfulp.errors import UsageError
from halfulp.studies.claims import claims_of
from halfulp.study import Cell, Estimand, Gate, Rule, Running, Stage, Study
from halfulp.study.protocol import Config, Json, Records, Values

TABLE = """
[paper]
source = "section 1"
note = "all"
claims = [
  { claim = "heads, {}", paper = { a = 1, b = "none" }, ours = "heads {}" },
  { claim = "sides", source = "section 2", paper = 2, ours = "also sides", note = "" },
  { claim = "tosses", paper = 3, ours = "tosses" },
  { claim = "heads", paper = "0 to 1", ours = "range heads" },
  { claim = "heads of a", paper = 1, ours = "most heads a" },
  { claim = "outcome", paper = "one side", ours = "label" },
]
[paper.notes]
all = "two tosses"
"""


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


def test_rows_become_claims(tmp_path: Path) -> None:
    (tmp_path / "coin.toml").write_text(TABLE, encoding="utf-8")
    module = ModuleType("coin")
    vars(module).update(__file__=str(tmp_path / "coin.py"), STUDY=STUDY, also=also, tosses=tosses)
    claims = claims_of(module)
    assert [(c.claim, c.source, c.paper, c.ours(RECORDS), c.note) for c in claims] == [
        ("heads, a", "section 1", 1, 1, "two tosses"),
        ("heads, b", "section 1", "none", None, "two tosses"),
        ("sides", "section 2", 2, 3, ""),
        ("tosses", "section 1", 3, 3, "two tosses"),
        ("heads", "section 1", "0 to 1", "0.000 to 1.000", "two tosses"),
        ("heads of a", "section 1", 1, 1, "two tosses"),
        ("outcome", "section 1", "one side", "one side", "two tosses"),
    ]
    del module.tosses
    with pytest.raises(UsageError, match="a claim is about 'tosses', which it does not compute"):
        claims_of(module)
