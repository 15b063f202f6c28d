"""``python -m torture [--long] [--only fuzz,kill]``: exit code 1 when anything was lost."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

from torture import Effort, commit, keep

PARTS = ("fuzz", "forge", "kill", "disks", "oracles", "order", "scale", "mutants", "native", "silenced")


def main() -> int:
    arguments = argparse.ArgumentParser(prog="torture", description=__doc__)
    arguments.add_argument("--long", action="store_true", help="the form of some hours")
    arguments.add_argument("--only", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    arguments.add_argument("--what", default="", help="only trials whose name this expression finds")
    arguments.add_argument("--most", type=int, default=2**63, help="no trial is made more often than this")
    arguments.add_argument("--again", action="store_true", help="mutants that an earlier run noticed, too")
    asked = arguments.parse_args()
    parts = asked.only.split(",")
    if len(parts) > 1:  # each in a process of its own: none finds what another imported or left
        flags = [flag for flag, given in (("--long", asked.long), ("--again", asked.again)) if given]
        rest = [*flags, "--what", asked.what, "--most", str(asked.most)]
        command = [sys.executable, "-m", "torture"]
        codes = {p: subprocess.run([*command, "--only", p, *rest], check=False).returncode for p in parts}
        for part, code in codes.items():
            if code not in (0, 1):
                print(f"{part}: LOST: its process ended with {code}")
        return int(any(codes.values()))
    lost, before = 0, commit()  # the page changes on the way
    with tempfile.TemporaryDirectory(prefix="halfulp-torture-") as folder:
        for trial in importlib.import_module(f"torture.{parts[0]}").trials(
            Effort(asked.long, Path(folder), asked.what, asked.most, asked.again)
        ):
            lost += trial.lost
            told = f"{trial.lost} LOST" if trial.lost else "nothing lost"
            print(
                f"{trial.part}: {trial.what}: {trial.tried:,} tried, {told}, {trial.seconds:.1f} s", end=" "
            )
            print(trial.note, flush=True)
            trial.commit = before
            keep([trial])
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
