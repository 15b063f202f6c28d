"""The oldest versions that pyproject.toml allows, as a constraints file: ``make test-lowest``.

Of what halfulp needs when it runs. The tools of the tests come as new as these let them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

OPTIONAL = ("sign", "figures")


def lowest(pyproject: Path) -> list[str]:
    """``name==version`` for each ``name>=version``. Anything else there is a mistake."""
    project = tomllib.loads(pyproject.read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in OPTIONAL:
        asked += project["optional-dependencies"][extra]
    pins = []
    for requirement in asked:
        found = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", requirement)
        if found is None:
            raise SystemExit(f"{pyproject}: {requirement!r} is not of the form name>=version")
        pins.append(f"{found[1]}=={found[2]}")
    return sorted(pins)


if __name__ == "__main__":
    print("\n".join(lowest(Path(sys.argv[1]))))
