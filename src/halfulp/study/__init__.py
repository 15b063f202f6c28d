"""Studies whose verdict can be believed by someone who was not there.

A study is declared (`protocol`), sealed, run cell by cell, and validated from its raw records
alone. Nothing here knows what the studies are about.
"""

from halfulp.study.protocol import Cell, Estimand, Gate, Rule, Running, Stage, Study, Table

__all__ = ["Cell", "Estimand", "Gate", "Rule", "Running", "Stage", "Study", "Table"]
