"""Equal bits whatever the order: hash seeds, threads, workers, ranks, shuffled parameters, parts of traces.

As a program (``python -m torture.order THREADS SHUFFLE PART``) it prints digests of everything that an audit,
an allocation and the training of each policy leave.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from audit_ranks import FLOAT_SUMS

import halfulp as hu
from halfulp import kernels
from torture import Clock, Effort, Trial

HERE = Path(__file__).parent.parent
PLACE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")])}
GRIDS = ["bf16", "e4m3@128", "int4/g32", "mxfp4"]
POLICIES = ("rne", "sr", "deadzone-sr", "kahan", "eco", "master")
SEEDS = (0, 1, 2, 12345, 4294967295)


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 200), torch.nn.Tanh(), torch.nn.Linear(200, 40))


def proposals(model: torch.nn.Module, step: int) -> None:
    """Gradients from a stream, tensor by tensor and by name, so that no sum depends on how it is taken."""
    for name, p in model.named_parameters():
        words = hu.Stream(seed=5, name=name, step=step).words(p.numel()).astype("float64")
        p.grad = torch.from_numpy(words / 2.0**32 - 0.5).float().reshape(p.shape)


def parameters(model: torch.nn.Module, shuffle: int) -> list[torch.nn.Parameter]:
    found = list(model.parameters())
    random.Random(shuffle).shuffle(found) if shuffle else None
    return found


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def everything(shuffle: int, part: int) -> dict[str, str]:
    """What has to be equal, by name."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = made()
        optimizer = torch.optim.AdamW(parameters(model, shuffle), lr=1e-3)
        options: dict[str, Any] = {
            "scores": ("e4m3@128", 1, 12),
            "expected_never_moved": True,
            "part_steps": part,
        }
        with hu.Audit(optimizer, GRIDS, model=model, out=Path(folder, "trace"), **options):
            for step in range(1, 13):
                proposals(model, step)
                optimizer.step()
        trace = hu.Trace.open(Path(folder, "trace"))
        table = trace.table().to_polars()
        table = table.sort([c for c in ("step", "tensor", "grid") if c in table.columns])
        found["the table of a trace"] = digest(table.write_csv(float_precision=None).encode())
        for grid in GRIDS:
            found[f"frozen on {grid}"] = digest(trace.frozen(grid).tobytes())
        mask = hu.allocate(trace, 0.5)
        found["a mask"] = digest(*(n.encode() + mask.tiles[n].numpy().tobytes() for n in sorted(mask.tiles)))
    for policy in POLICIES:
        model = made()
        inner = torch.optim.AdamW(parameters(model, shuffle), lr=1e-3)
        opt = hu.WriteBack(inner, "e4m3@128", policy, model=model, seed=3)
        for step in range(1, 9):
            proposals(model, step)
            opt.step()
        weights, matrices = model.state_dict(), [n for n, p in model.named_parameters() if p.dim() >= 2]
        found[f"weights under {policy}"] = digest(
            *(n.encode() + weights[n].numpy().tobytes() for n in sorted(weights))
        )
        found[f"events under {policy}"] = digest(*(repr(opt.events[n]).encode() for n in matrices))
    return found


def asked(seed: int = 0, threads: int = 1, shuffle: int = 0, part: int = 5) -> dict[str, str]:
    """:func:`everything` in a process of its own."""
    place = {**PLACE, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "torture.order", str(threads), str(shuffle), str(part)]
    done = subprocess.run(command, env=place, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def ranks(effort: Effort, mode: str, world: int) -> int:
    """The trace of an audit over ranks beside that of one process: 1 if it differs or a rank failed."""
    folder = effort.folder / f"{mode}{world}"
    folder.mkdir()
    place = {**PLACE, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def start(how: str, rank: int, count: int) -> subprocess.Popen[bytes]:
        arguments = [how, str(folder), str(rank), str(count)]
        return subprocess.Popen([sys.executable, str(HERE / "audit_ranks.py"), *arguments], env=place)

    processes = [start("single", 0, 1)]
    processes[0].wait()
    processes += [start(mode, rank, world) for rank in range(world)]
    if any(process.wait() for process in processes):
        return 1
    found, single = (hu.Trace.open(folder / name) for name in (mode, "single"))
    return int(any(_differ(found, single, table, mode) for table in ("grids", "tensors")))


def _differ(found: hu.Trace, single: hu.Trace, table: str, mode: str) -> bool:
    """Whether a number differs; of shards, one that is no sum of floats: ranks add those in another order."""
    a, b = (trace.scan(table).to_polars() for trace in (found, single))
    kept = [c for c in b.columns if mode == "ddp" or c not in FLOAT_SUMS]
    return not a.select(kept).equals(b.select(kept), null_equal=True)


def written_back(effort: Effort, world: int) -> tuple[int, int]:
    """Training under every policy on so many ranks beside one process: how many cases, how many differ."""
    from forks import launch
    from writeback.test_distributed import KEYS
    from writeback_distributed import CASES, NARROW, joined, single, single_narrow

    alone = {f"{grid} {policy}": single(grid, policy) for grid, policy in CASES}
    alone |= {f"narrow {policy}": single_narrow(policy) for policy in NARROW}
    folder = effort.folder / f"written{world}"
    folder.mkdir()
    launch("writeback_distributed.py", world, folder)
    found = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]
    wrong = 0
    for key in KEYS:
        expected = alone[key.partition(" ")[2]]
        wrong += not all(_as_alone(run, expected) for run in joined([one[key] for one in found]))
    return len(KEYS), wrong


def resharded(effort: Effort) -> Iterator[Trial]:
    """Saved by ranks as a distributed checkpoint and gone on with by another number of them, or in another
    layout: the end is that of one process that was never stopped."""
    from forks import launch
    from resharded_ranks import CASES
    from writeback_distributed import STOP, joined, single

    alone = {f"{grid} {policy}": single(grid, policy) for grid, policy in CASES}

    def part(name: str, layout: str, world: int, **job: str | None) -> Path:
        folder = effort.folder / "resharded" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps({"layout": layout, "save": None, "load": None, **job}))
        launch("resharded_ranks.py", world, folder)
        return folder

    ways = {"2 ranks of FSDP2": ("fsdp", 2), "4 ranks of HSDP": ("hsdp", 4)}
    for before, (layout, world) in ways.items():
        saved = effort.folder / "resharded" / before
        part(f"{before}, saved", layout, world, save=str(saved))
        for after in (("fsdp", 1), ("fsdp", 4), ("hsdp", 4)):
            if (layout, world) == after:
                continue
            clock, (layout_after, ranks_after) = Clock(), after
            folder = part(f"{before}, {after}", layout_after, ranks_after, load=str(saved))
            shards = ranks_after // 2 if layout_after == "hsdp" else ranks_after  # one replica of them
            found = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(shards)]
            wrong = 0
            for key, expected in alone.items():
                rest = {**expected, "events": expected["events"][STOP:]}
                runs = joined([one[key] for one in found])
                wrong += not all(_as_alone(run, rest) for run in runs)
            what = f"saved by {before}, gone on with by {ranks_after} of {LAYOUTS[layout_after]}"
            yield Trial("Order", what, len(alone), wrong, clock())


LAYOUTS = {"fsdp": "FSDP2", "hsdp": "HSDP"}


def _as_alone(run: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Weights, what is kept, and events. (The codes of packed weights are there beside the weights.)"""
    pairs = [(run[part].get(n), v) for part in ("weights", "kept") for n, v in expected[part].items()]
    return run["events"] == expected["events"] and all(
        a is not None and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in pairs
    )


def resume_points(effort: Effort) -> tuple[int, int]:
    """Every policy and storage, saved before each step and gone on with: how many, how many differ."""
    from writeback_resume import CASES, FORMATS, STEPS, Run

    tried = wrong = 0
    for case in CASES:
        run, folder = Run(case), effort.folder / "points" / case
        whole = []
        for number in range(STEPS):
            run.save(folder / str(number), FORMATS[number % 2])
            whole.append(run.step(number))
        for number in range(1, STEPS, effort.of(4, 1)):
            again = Run(case)
            again.load(folder / str(number), FORMATS[number % 2])
            tried += 1
            wrong += [again.step(n) for n in range(number, min(number + 2, STEPS))] != whole[number:][:2]
        shutil.rmtree(folder)
    return tried, wrong


def chunks() -> tuple[int, int]:
    """Rounding and write-back of pieces beside those of the whole tensor: how many, how many differ."""
    n, tried, wrong = 20_000, 0, 0
    stream = hu.Stream(seed=9, name="w", step=4)
    words = stream.words(2 * n).astype("float64") / 2.0**32 - 0.5
    q, d = (torch.from_numpy(x).float() for x in (words[:n] * 0.1, words[n:] * 0.001))
    for name in ("bf16", "e4m3@128", "e5m2", "int4@16/asym"):
        grid = hu.grid(name)
        stored = grid.round(q)
        for mode in ("nearest", "stochastic", "deadzone"):
            draws = None if mode == "nearest" else stream
            whole = kernels.write_back(stored, stored + d, grid, mode, draws).out
            for size in (1, 7, 767, 768, 769, 4096):
                ends = range(0, min(n, 200 * size), size)  # of single weights, the first two hundred
                pieces = [
                    kernels.write_back(
                        stored[a : a + size], (stored + d)[a : a + size], grid, mode,
                        draws and stream.at(a),
                    ).out
                    for a in ends
                ]  # fmt: skip
                tried += 1
                together = torch.cat(pieces)
                wrong += not torch.equal(together, whole[: len(together)])
    return tried, wrong


def workers(effort: Effort) -> tuple[int, int]:
    """A study whose cells run in this process, and in one, two and three workers."""
    from study.samples import run, study_file, tree

    from torture.kill import STUDY

    path = study_file(effort.folder / "workers", STUDY)
    trees = []
    for count in (1, 2, 3):
        run(path, effort.folder / "workers" / str(count), executor="local", workers=count)
        trees.append(tree(effort.folder / "workers" / str(count)))
    return len(trees), sum(found != trees[0] for found in trees)


def trials(effort: Effort) -> Iterator[Trial]:
    torch.set_num_threads(1)
    parts = {
        "digests": lambda: digests(effort),
        "chunks": lambda: _one(
            "pieces of a tensor, of 1 to 4,096 weights, in three modes on four grids", chunks
        ),
        "resume": lambda: _one(
            "points to resume from, of every policy and storage", lambda: resume_points(effort)
        ),
        "workers": lambda: _one("one, two and three workers of a study", lambda: workers(effort)),
        "write-back": lambda: over_ranks(effort),
        "resharded": lambda: resharded(effort),
        "audit": lambda: audits(effort),
    }
    for name, part in parts.items():
        if effort.wants(name):
            yield from part()


def _one(what: str, run: Callable[[], tuple[int, int]]) -> Iterator[Trial]:
    clock = Clock()
    tried, lost = run()
    yield Trial("Order", what, tried, lost, clock())


def over_ranks(effort: Effort) -> Iterator[Trial]:
    for world in (1, 2, 4):
        what = f"write-backs over {world} rank{'s' * (world > 1)} under DDP and FSDP2, resumed ones too"
        yield from _one(what, functools.partial(written_back, effort, world))


def digests(effort: Effort) -> Iterator[Trial]:
    clock, plain = Clock(), asked()

    def compare(what: str, cases: list[dict[str, int]]) -> Trial:
        found = [asked(**case) for case in cases]
        wrong = sorted({name for one in found for name in plain if one.get(name) != plain[name]})
        note = f"{len(plain)} digests each" + (f"; differ: {', '.join(wrong)}" if wrong else "")
        return Trial("Order", what, len(cases), len(wrong), clock(), note)

    yield compare("hash seeds", [{"seed": seed} for seed in SEEDS])
    yield compare("one and two threads", [{"threads": 1}, {"threads": 2}])
    yield compare("parameters shuffled", [{"shuffle": n} for n in range(1, effort.of(3, 9))])
    yield compare("parts of a trace: 1, 2, 7 and 100 steps", [{"part": n} for n in (1, 2, 7, 100)])


def audits(effort: Effort) -> Iterator[Trial]:
    clock = Clock()
    for mode in ("ddp", "fsdp"):
        for world in (1, 2, 4):
            lost = ranks(effort, mode, world)
            what = f"an audit over {world} rank{'s' * (world > 1)} under {mode}"
            yield Trial("Order", what, world, lost, clock())


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(everything(int(sys.argv[2]), int(sys.argv[3]))))
