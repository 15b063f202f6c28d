"""Studies whose verdict can be believed by someone who was not there.

A study is declared (`protocol`), sealed, run cell by cell, and validated from its raw records
alone. Nothing here knows what the studies are about.
"""

from halfulp.study.outcomes import Outcomes
from halfulp.study.protocol import Cell, Estimand, Evidence, Gate, Rule, Running, Stage, Study, Table
from halfulp.study.reading import Opened, open_closed
from halfulp.study.retrospective import Retrospective

__all__ = [
    "Cell", "Estimand", "Evidence", "Gate", "Opened", "Outcomes", "Retrospective", "Rule", "Running", "Stage",
    "Study", "Table", "open_closed",
]  # fmt: skip
