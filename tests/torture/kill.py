"""SIGKILL anywhere: what goes on afterwards is, bit for bit, what was never killed.

Studies and their executors, audits, and the training of every policy, at random moments; studies, audits,
checkpoints, corpora, pages and pilots before every single operation on the disk, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from study.samples import tree
from writeback_resume import CASES, STEPS, Run

import halfulp as hu
from halfulp import files
from halfulp.writeback import save
from torture import Clock, Effort, Trial

HERE = Path(__file__).parent.parent
PLACE = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
    "OMP_NUM_THREADS": "1",
}


def said(script: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, env=PLACE, capture_output=True, text=True, check=True).stdout


# ---- studies ----


def every_operation(effort: Effort) -> Iterator[Trial]:
    clock = Clock()
    found = json.loads(said("study/kill.py", str(effort.folder / "study")))
    tried = found["every operation"]["operations"] + found["in batches"]["operations"]
    lost = len(found["every operation"]["differing"]) + len(found["in batches"]["differing"])
    yield Trial("Kill", "a study, before every operation on the disk", tried, lost, clock())
    cuts = found["torn ledger"]
    yield Trial("Kill", "a study, its ledger torn", cuts["cuts"], len(cuts["differing"]), 0.0)


STUDY = """
import os, time
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study


def cells(config):
    return [Cell(name=f"cell-{i}", config={"i": i}) for i in range(config["cells"])]


def run(cell):
    done = int(cell.load() or b"0")
    for step in range(done, 4):
        time.sleep(0.01)
        cell.save(str(step + 1).encode())
    cell.attach("it.bin", bytes([cell.config["i"] % 256]))
    return {"value": cell.config["i"] / 7}


def value(records):
    return {name: record["value"] for name, record in records["only"].items()}


study = Study(
    name="many", question="q", units="u", not_claimed=(), threads=1, scales={"small": {"cells": 60}},
    stages=(Stage(name="only", kind="outcome", cells=cells, run=run),),
    estimands=(Estimand(name="value", what="v", compute=value),),
    gates=(Gate(name="g", estimand="value", scope="all", comparison=">=", threshold=0),),
    rules=(Rule(label="yes", passed=("g",)), Rule(label="no")),
)
"""


def executors(effort: Effort, executor: str, kills: int) -> Iterator[Trial]:
    """The whole process group killed after a random while, until enough; then run to the end."""
    clock, folder = Clock(), effort.folder / executor
    folder.mkdir()
    (folder / "many.py").write_text(STUDY)

    def command(out: str) -> list[str]:
        asked = ["study", "run", str(folder / "many.py"), "--scale", "small", "--out", str(folder / out)]
        return [sys.executable, "-m", "halfulp", *asked, "--executor", executor, "--workers", "2"]

    def wait(out: str, seconds: float | None) -> bool:
        """Whether it came to its end."""
        with (folder / "said").open("ab") as said:
            process = subprocess.Popen(
                command(out), env=PLACE, stdout=said, stderr=said, start_new_session=True
            )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False

    began = time.perf_counter()
    whole = wait("whole", None)
    usual = time.perf_counter() - began
    expected = tree(folder / "whole")
    rng, killed, lost = random.Random(executor), 0, int(not whole)
    while killed < kills:
        out = f"killed{killed}"
        while not wait(out, rng.uniform(0.2, 1.0) * usual):
            killed += 1
        lost += tree(folder / out) != expected
        shutil.rmtree(folder / out)
    yield Trial("Kill", f"a study under `{executor}`, two workers, at random", killed, lost, clock())


MARKED = """
    if "TORTURE_MARKS" in os.environ:  # the node that is at work on it says so
        import ray
        open(os.path.join(os.environ["TORTURE_MARKS"], ray.get_runtime_context().get_node_id()), "a").close()
        time.sleep(0.3)
"""


def nodes(effort: Effort) -> Iterator[Trial]:
    """Of three nodes of a Ray cluster one is killed on the way. The same run goes on, without its cells."""
    clock, folder = Clock(), effort.folder / "nodes"
    folder.mkdir()
    study = folder / "many.py"
    cell = "    done = int("
    study.write_text(STUDY.replace("threads=1,", "threads=1, retries=3,").replace(cell, MARKED + cell))
    local = ["study", "run", str(study), "--scale", "small", "--out", str(folder / "whole"), "--workers", "1"]
    with (folder / "said").open("ab") as told:
        quiet: dict[str, Any] = {"env": PLACE, "stdout": told, "stderr": told}
        subprocess.run([sys.executable, "-m", "halfulp", *local], check=True, **quiet)
        rng, kills, lost, cells = random.Random("nodes"), effort.of(2, 5), 0, 0
        for number in range(kills):
            out = folder / f"out{number}"
            before = str(rng.randrange(5, 50))
            command = [sys.executable, "-m", "torture.nodes", str(study), str(out), before]
            ended = subprocess.run(command, check=False, **quiet).returncode == 0
            lost += not ended or tree(out) != tree(folder / "whole")
            cells += (out / "ledger.jsonl").read_bytes().count(b'"event":"failed"')
            shutil.rmtree(out)
    note = f"{cells} cells lost with their nodes and run again by others"
    yield Trial("Kill", "a node of three of a Ray cluster, at random", kills, lost, clock(), note)


# ---- audits ----


def audits(effort: Effort) -> Iterator[Trial]:
    from trace.test_kills import Runs, assert_same_scores, assert_same_tables

    clock, runs, rng = Clock(), Runs(), random.Random("audits")
    runs.run(effort.folder / "first")
    began = time.perf_counter()
    runs.run(effort.folder / "whole")
    usual = time.perf_counter() - began
    whole = hu.Trace.open(effort.folder / "whole")
    kills = complete = lost = 0
    while kills < effort.of(30, 1000):
        folder = effort.folder / f"audit{complete}"
        outcome, _ = runs.run(folder, rng.uniform(0.0, 0.5) * usual)
        kills += outcome == "killed"
        if outcome == "done":
            complete += 1
            try:
                assert_same_tables(hu.Trace.open(folder), whole)
                assert_same_scores(hu.Trace.open(folder), whole)
            except AssertionError:
                lost += 1
            shutil.rmtree(folder)
        elif (folder / "manifest.json").exists():
            try:
                hu.Trace.open(folder)
            except hu.HalfulpError:
                lost += 1
    runs.process.kill()
    runs.process.wait()
    yield Trial("Kill", "an audit, at random", kills, lost, clock(), f"{complete} traces completed and equal")


def audits_at_every_operation(effort: Effort) -> Iterator[Trial]:
    """The last of them was not killed: it is what the others must be."""
    from trace.test_kills import assert_same_scores, assert_same_tables

    clock, place = Clock(), effort.folder / "operations"
    last = said("audit_kill.py", str(place)).split()[-2]
    whole, lost = hu.Trace.open(place / last), 0
    for number in range(1, int(last)):
        try:
            assert_same_tables(hu.Trace.open(place / str(number)), whole)
            assert_same_scores(hu.Trace.open(place / str(number)), whole)
        except (AssertionError, hu.HalfulpError) as error:
            lost += 1
            print(f"lost: killed before operation {number}: {error}", flush=True)
    yield Trial("Kill", "an audit, before every operation on the disk", int(last) - 1, lost, clock())


# ---- training ----


def train(case: str, folder: Path) -> None:
    """From the newest checkpoint to the last step; each step leaves a checkpoint and a digest of all."""
    run = Run(case)
    done = max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=0)
    if done:
        run.load(folder / str(done), "torch")
    for number in range(done, STEPS):
        digest = run.step(number)
        part = folder / f"part-{os.getpid()}-{number}"
        run.save(part, "torch")
        (part / "digest").write_text(digest)
        part.rename(folder / str(number + 1))


def forked(case: str, folder: Path) -> int:
    """:func:`train` in a fork of this process, which has compiled everything; its number."""
    child = os.fork()
    if child == 0:
        try:
            train(case, folder)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(int(not (folder / str(STEPS)).is_dir()))
    return child


def digests(folder: Path) -> list[str]:
    """Of every step."""
    return [(folder / str(number) / "digest").read_text() for number in range(1, STEPS + 1)]


def policies(effort: Effort) -> Iterator[Trial]:
    """Each case in forks of this process, killed after a random while, until one comes to the end."""
    torch.set_num_threads(1)
    clock, rng = Clock(), random.Random("policies")
    kills = lost = 0
    for case in CASES:
        (effort.folder / case).mkdir()
        train(case, effort.folder / case)  # here, so that no fork has to compile
        for again in range(effort.of(10, 40)):
            folder = effort.folder / f"{case}-{again}"
            (folder / "whole").mkdir(parents=True)
            began = time.perf_counter()
            os.waitpid(forked(case, folder / "whole"), 0)
            usual = time.perf_counter() - began
            (folder / "killed").mkdir()
            while True:
                child = forked(case, folder / "killed")
                deadline = time.perf_counter() + rng.uniform(0.2, 1.0) * usual
                while time.perf_counter() < deadline:
                    if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                        break
                    time.sleep(0.0005)
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                if os.WIFEXITED(status):
                    ended = os.WEXITSTATUS(status) == 0
                    break
                kills += 1
            if not ended or digests(folder / "killed") != digests(folder / "whole"):
                lost += 1
                found = [p.name for p in sorted((folder / "killed").iterdir())]
                print(f"lost: {case}/{again}: {'not equal' if ended else 'failed'}: {found}", flush=True)
            shutil.rmtree(folder)
    yield Trial("Kill", f"training under {len(CASES)} policies and storages, at random", kills, lost, clock())


def checkpoints(effort: Effort) -> Iterator[Trial]:
    """Killed while one is replaced: it is the old one or the new one, whole, and the next saving works."""
    torch.set_num_threads(1)
    clock, kills, lost = Clock(), 0, 0
    file = effort.folder / "state.safetensors"
    for case in CASES:
        run, states = Run(case), []
        for number in range(2):
            run.step(number)
            save(run.opt, file)
            states.append(file.read_bytes())
        operation = 1
        while True:
            file.write_bytes(states[0])
            if not forks.killed(lambda event, run=run: save(run.opt, file), operation):
                break
            kills, operation = kills + 1, operation + 1
            found = file.read_bytes()
            save(run.opt, file)
            lost += found not in states or file.read_bytes() != states[1]
    what = f"checkpoints of {len(CASES)} policies and storages, before every operation on the disk"
    yield Trial("Kill", what, kills, lost, clock())


def demo(effort: Effort) -> Iterator[Trial]:
    """Killed on its way, it leaves traces that open; run again beside them, it says what a demo says that was
    never killed."""
    clock, kills, rng = Clock(), effort.of(2, 20), random.Random("demo")
    command = [sys.executable, "-m", "halfulp", "demo", "--quick"]

    def told(place: Path) -> list[str]:
        place.mkdir(exist_ok=True)
        done = subprocess.run(command, cwd=place, env=PLACE, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if " s" not in line and "second" not in line]

    told(effort.folder / "first")  # compiles what all the others need
    began = time.perf_counter()
    expected = told(effort.folder / "whole")
    usual = time.perf_counter() - began
    killed = ended = opened = lost = 0
    while killed < kills:
        place = effort.folder / f"demo{killed + ended}"
        place.mkdir()
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=place, env=PLACE, start_new_session=True, **quiet)
        try:
            process.wait(rng.uniform(0.2, 0.9) * usual)
            ended += 1
            continue
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
        for manifest in place.rglob("manifest.json"):
            try:
                found = hu.Trace.open(manifest.parent)
                opened += bool(found.parts) and len(found.table()) > 0  # or killed before its first part
            except hu.HalfulpError as error:
                lost += 1
                print(f"lost: {manifest.parent}: {error}", flush=True)
        lost += told(place) != expected
    note = f"{opened} traces of killed ones opened"
    yield Trial("Kill", "the demo (`--quick`), at random", killed, lost, clock(), note)


# ---- commands ----


def every_point(run: Callable[[Path], object], folder: Path) -> tuple[int, list[Path]]:
    """A run killed before each operation on the disk, and gone on with: how many, and what each left."""
    number, ended = 0, []
    while True:
        number += 1
        place = folder / str(number)
        place.mkdir(parents=True)
        if not forks.killed(lambda event, place=place: run(place), number):
            return number - 1, [*ended, place]
        assert not forks.killed(lambda event, place=place: run(place), 0), "nothing kills it"
        ended.append(place)


def commands(effort: Effort) -> Iterator[Trial]:
    """A corpus, a page of two checkpoints, a pilot: what goes on leaves what was never killed."""
    from data import small_corpus
    from pilots.pilot_run import Small, counted
    from safetensors.torch import save_file

    from halfulp.cli import app
    from halfulp.data import prose
    from halfulp.pilots.pilot import Pilot

    def pilot(place: Path) -> None:
        torch.manual_seed(5)
        asked: dict[str, Any] = {"updates": 4, "budget": 2.0, "cost": counted, "out": place}
        told = Pilot(Small, ("e4m3@128",), **asked).run().to_json()
        (place / "answer").write_text(json.dumps(told))
        (place / "pilot.json").unlink()  # states it went on from; traces have random ids

    base, trained = effort.folder / "base.safetensors", effort.folder / "trained.safetensors"
    save_file({"w": torch.ones(3000, dtype=torch.bfloat16)}, base)
    save_file({"w": torch.linspace(1, 2, 3000).bfloat16()}, trained)

    def compare(place: Path) -> None:
        asked = ["diff", str(base), str(trained), "--page", str(place / "page.html")]
        app(asked, standalone_mode=False)

    with pytest.MonkeyPatch.context() as patch:
        mirror = small_corpus.small(effort.folder, patch)
        runs: dict[str, Callable[[Path], object]] = {
            "`halfulp data build`": lambda place: prose.build(place, str(mirror), lambda _: None),
            "`halfulp diff --page`": compare,
            "`halfulp pilot`": pilot,
        }
        for name, run in runs.items():
            clock = Clock()
            warm = effort.folder / name / "0"  # here, so that no fork has to import or compile
            warm.mkdir(parents=True)
            run(warm)
            kills, ended = every_point(run, effort.folder / name)
            found = [{k: v for k, v in tree(place).items() if files.PART not in k} for place in ended]
            lost = sum(one != found[-1] for one in found)
            yield Trial("Kill", f"{name}, before every operation on the disk", kills, lost, clock())


def trials(effort: Effort) -> Iterator[Trial]:
    named = {
        "policies": lambda: policies(effort),
        "checkpoints": lambda: checkpoints(effort),
        "audits": lambda: audits(effort),
        "audits at every operation": lambda: audits_at_every_operation(effort),
        "studies at every operation": lambda: every_operation(effort),
        "local": lambda: executors(effort, "local", effort.of(10, 100)),
        "commands": lambda: commands(effort),
        "demo": lambda: demo(effort),
    }
    if importlib.util.find_spec("ray") is not None:
        named["ray"] = lambda: executors(effort, "ray", effort.of(1, 10))
        named["nodes"] = lambda: nodes(effort)
    for name, part in named.items():
        if effort.wants(name):
            yield from part()
