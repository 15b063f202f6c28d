"""Run every recipe whose packages are installed, and print the matrix of what was shown.

    python examples/recipes/run_all.py [--distributed] [NAME ...]

``--distributed`` runs those that can on two gloo ranks as well. What is not installed is named, not counted
as shown. Exit code 1: a recipe failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPES: dict[str, tuple[str, ...]] = {
    "plain_loop": (),
    "compiled_step": (),
    "gradient_release": (),
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "lightning_trainer": ("lightning",),
    "fabric_loop": ("lightning",),
    "peft_lora": ("transformers", "peft"),
    "trl_trainers": ("transformers", "trl", "datasets"),
    "diffusers_ema": ("diffusers",),
    "timm_loop": ("timm",),
    "torchtitan_optimizer": ("torchtitan",),
}
"""Recipes, and what each needs beside torch."""
DISTRIBUTED = ("hf_trainer", "accelerate_loop", "lightning_trainer", "fabric_loop")
COLUMNS = ("audit", "fix", "resume", "distributed")


def missing(name: str) -> list[str]:
    """Return the packages of a recipe that are not installed."""
    return [package for package in RECIPES[name] if importlib.util.find_spec(package) is None]


def run(name: str, *, ranks: int = 1) -> dict[str, Any]:
    """Run a recipe in a process of its own, and return what it showed.

    Raises:
        RuntimeError: With what it said, if it failed.
    """
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    env = {**os.environ, **quiet, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(HERE / f"{name}.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    shown: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*RECIPES])
    parser.add_argument("--distributed", action="store_true")
    given = parser.parse_args()
    failed = 0
    print(f"| recipe | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}", flush=True)
    for name in given.names:
        if lacking := missing(name):
            print(f"| {name} | not run: {', '.join(lacking)} not installed | | | |", flush=True)
            continue
        try:
            shown = run(name)
            if given.distributed and name in DISTRIBUTED:
                shown["distributed"] = run(name, ranks=2)["distributed"]
        except RuntimeError as error:
            failed = 1
            print(error, file=sys.stderr)
            shown = dict.fromkeys(COLUMNS, "failed")
        print(f"| {name} | {' | '.join(shown.get(c, 'not run') for c in COLUMNS)} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
