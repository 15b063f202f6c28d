"""Equal bits whatever the order: hash seeds, threads, workers, ranks, shuffled parameters, parts of traces.

As a program (``python -m torture.order THREADS SHUFFLE PART``) it prints digests of everything that an audit,
an allocation and the training of each policy leave.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import halfulp as hu
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
        table = trace.table()
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
    from test_trace import assert_same_tables

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
    try:
        assert_same_tables(hu.Trace.open(folder / mode), hu.Trace.open(folder / "single"))
    except AssertionError:
        return 1
    return 0


def trials(effort: Effort) -> Iterator[Trial]:
    clock, plain = Clock(), asked()
    differing: list[str] = []

    def compare(what: str, cases: list[dict[str, int]]) -> Trial:
        found = [asked(**case) for case in cases]
        wrong = sorted({name for one in found for name in plain if one.get(name) != plain[name]})
        differing.extend(wrong)
        note = f"{len(plain)} digests each" + (f"; differ: {', '.join(wrong)}" if wrong else "")
        return Trial("Order", what, len(cases), len(wrong), clock(), note)

    yield compare("hash seeds", [{"seed": seed} for seed in SEEDS[: effort.of(3, 5)]])
    yield compare("one and two threads", [{"threads": 1}, {"threads": 2}])
    yield compare("parameters shuffled", [{"shuffle": n} for n in range(1, effort.of(3, 9))])
    yield compare("parts of a trace: 1, 2, 7 and 100 steps", [{"part": n} for n in (1, 2, 7, 100)])
    for mode in ("ddp", "fsdp"):
        for world in (2, 4):
            lost = ranks(effort, mode, world)
            yield Trial("Order", f"an audit over {world} ranks under {mode}", world, lost, clock())


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(everything(int(sys.argv[2]), int(sys.argv[3]))))
