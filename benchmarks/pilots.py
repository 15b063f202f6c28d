"""Make the table of scores that the intervals of pilots are read from.

    python benchmarks/pilots.py RECORDS [--table src/halfulp/verdicts/intervals.json] [--only e4m3@128:eco]

Every unit below is run as a pilot could run it, and then on every format in earnest. What a unit showed is
kept as RECORDS/NAME.json, so an interrupted run goes on. Seeds are none that a study uses. About 40 minutes
on one core of a quiet machine; HALFULP_DATA names the folder of the texts. With ``--only`` the rows of one
family of policies are made anew, and the others of the table stay: as when its rehearsal changed.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfulp import documents, files
from halfulp.paper.studies import _pilot_runs as pilot_runs
from halfulp.paper.studies._pilot_runs import classifier, decoder
from halfulp.pilots import rungs
from halfulp.pilots.estimates import gaps, row
from halfulp.verdicts import intervals

FORMATS = ("e4m3@128", "e5m2", "mxfp4", "e5m2:sr", "e4m3@128:eco")
UNITS = {
    "gpt2-low": decoder("gpt2", peak=9e-4, updates=200, batch=12, seed=72001),
    "modern-middle": decoder("modern", peak=1.8e-3, updates=200, batch=16, seed=72002),
    "neox-high": decoder("neox", peak=3.6e-3, updates=200, batch=12, seed=72003),
    "gpt2-corner": decoder("gpt2", peak=3e-3, updates=300, batch=16, seed=72004),
    "classifier-middle": classifier(peak=1e-3, updates=300, batch=64, seed=72009),
    "classifier-high": classifier(peak=3e-3, updates=300, batch=64, seed=72010),
    "classifier-low": classifier(peak=5e-4, updates=600, batch=32, seed=72011),
    "modern-low": decoder("modern", peak=6e-4, updates=300, batch=24, seed=72005),
    "neox-middle": decoder("neox", peak=1.2e-3, updates=300, batch=12, seed=72006),
    "gpt2-lion": decoder("gpt2", peak=4e-4, updates=200, batch=12, seed=72007, optimizer="lion"),
    "modern-sgd": decoder("modern", peak=3e-1, updates=200, batch=12, seed=72008, optimizer="sgd"),
    "neox-corner": decoder("neox", peak=3e-3, updates=400, batch=24, seed=72012),
    "gpt2-long": decoder("gpt2", peak=2.4e-3, updates=600, batch=12, seed=72013),
}
PART, FORKS = 1, {"0.4": ["lower", "point", "upper"], "0.2": ["point"], "0.1": ["point"]}


def made(name: str, data: Path, formats: tuple[str, ...]) -> dict[str, Any]:
    """Run a unit, and its formats in earnest."""
    config = {**UNITS[name], "formats": list(formats), "parts": [PART], "forks": FORKS}
    if config.get("optimizer") == "lion":
        config["formats"] = [f for f in formats if not f.endswith("eco")]
    record = pilot_runs.measure(config, lambda file: data / file, lambda *_: None)
    what = pilot_runs.training(config, lambda file: data / file)
    truth = {spec: rungs.twin(replace(what, formats=(spec,)), spec, None) for spec in what.formats}
    return {"config": config, "record": record, "outcome": truth}


def scores(found: dict[str, Any]) -> dict[str, list[float]]:
    """Score every estimator on every format of every unit; twins that the guard distrusts are left out."""
    table: dict[str, list[float]] = {}
    for unit in found.values():
        for at, share in enumerate(FORKS):
            seen = pilot_runs.seen_of(unit["record"], unit["config"], str(PART), share)
            for spec, known in seen.items():
                measured = unit["outcome"][spec] - known.reference
                for kind, gap in gaps(known).items():
                    once = kind == "fork" or at == 0
                    if once and not (kind in ("twin", "raw") and known.reads_low()):
                        score = intervals.score(gap, measured, known.floor)
                        table.setdefault(row(kind, known), []).append(round(score, 4))
    return {name: sorted(each) for name, each in sorted(table.items())}


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", choices=FORMATS)
    given = parser.parse_args()
    formats = FORMATS if given.only is None else (given.only,)
    known, others = (), {}
    if given.only is not None:
        others = {name: list(each) for name, each in intervals.load(given.table).items()}
        known = json.loads(given.table.read_text())["units"]
    torch.set_num_threads(1)
    given.records.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in UNITS:
        if formats[0].endswith("eco") and UNITS[name].get("optimizer") == "lion":
            continue
        path = given.records / f"{name}.json"
        if not path.exists():
            unit = made(name, Path(os.environ["HALFULP_DATA"]), formats)
            files.put(path, json.dumps(unit, indent=1).encode())
        found[name] = json.loads(path.read_text())
        print(name, found[name]["outcome"], flush=True)
        if given.table is not None:
            units = sorted({*found, *(known if given.only else ())})
            document = {"kind": intervals.KIND, "units": units, "scores": {**others, **scores(found)}}
            files.put(given.table, documents.sealed(document))


if __name__ == "__main__":
    main()
