"""Studies whose verdict can be believed by someone who was not there.

A study is declared (`protocol`), sealed, run cell by cell, and validated from its raw records
alone. Nothing here knows what the studies are about.
"""

from halfulp.study.evidence import Opened, Retrospective, open_closed
from halfulp.study.gates import decide
from halfulp.study.protocol import (
    Cell,
    Estimand,
    Evidence,
    Gate,
    Outcomes,
    Rule,
    Running,
    Stage,
    Study,
    Table,
)

__all__ = [
    "Cell", "Estimand", "Evidence", "Gate", "Opened", "Outcomes", "Retrospective", "Rule", "Running", "Stage",
    "Study", "Table", "decide", "open_closed",
]  # fmt: skip
