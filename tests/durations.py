"""How long tests take, as a table in the repository: what is slow is read from it, not marked by hand.

``tests/durations.tsv`` has a row for every test function: its file and name, how many tests it is, and the
seconds that they took together (fixtures included). ``pytest --durations-to FILE`` writes such a table from
the run at hand; ``make durations`` brings the one in the repository up to date.

- A function whose tests take long each is *slow*: ``make check`` leaves it out (``-m "not slow"``). One
  that the table does not know is not slow, so what is new is always run.
- When several processes share the work, each takes whole files, the longest first: what a module prepares
  is prepared once, and nobody waits at the end for a long file that began last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

TABLE = Path(__file__).with_suffix(".tsv")
SLOW_SECONDS = 0.15  # a test, on average over those of its function


def function_of(node: str) -> str:
    """The test function of a node: ``tests/test_x.py::test_y[case]`` without the case."""
    return node.partition("[")[0]


class Durations:
    """Of every function: how many tests, how many seconds."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, function: str, seconds: float, tests: int = 0) -> None:
        self.tests[function] += tests
        self.seconds[function] += seconds

    def slow(self, function: str) -> bool:
        return self.seconds.get(function, 0.0) > SLOW_SECONDS * self.tests[function]

    def of_files(self) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        for function, seconds in self.seconds.items():
            total[function.partition("::")[0]] += seconds
        return total

    def write(self, path: Path) -> None:
        rows = [f"{name}\t{self.tests[name]}\t{self.seconds[name]:.2f}" for name in sorted(self.seconds)]
        path.write_text("\n".join(["function\ttests\tseconds", *rows]) + "\n")


def read(path: Path = TABLE) -> Durations:
    """The table in the repository; nothing where there is none."""
    found = Durations()
    lines: Iterable[str] = path.read_text().splitlines()[1:] if path.is_file() else ()
    for line in lines:
        function, tests, seconds = line.split("\t")
        found.add(function, float(seconds), int(tests))
    return found
