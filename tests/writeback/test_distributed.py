"""Two processes are one: data-parallel and sharded training give the weights of one, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import LOOPBACK, launch
from oracle import assert_same
from writeback_distributed import (
    CASES,
    GRIDS,
    NARROW,
    POLICIES,
    STEPS,
    STOP,
    TAKEN_OVER,
    Uneven,
    joined,
    single,
    single_narrow,
    taken_over,
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available() or sys.platform == "win32", reason="needs gloo"
)
RANKS = 2
KEYS = [
    *(f"fsdp {grid} {policy}" for grid, policy in CASES),
    *(f"{kind} e4m3@128 {policy}" for kind in ("ddp", "resumed") for policy in POLICIES),
    "packed e4m3@128 sr",  # data-parallel, from packed codes
    *(f"{kind} narrow {policy}" for kind in ("fsdp", "resumed") for policy in NARROW),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    launch("writeback_distributed.py", RANKS, folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {f"{grid} {policy}": single(grid, policy) for grid, policy in CASES}
    found |= {f"narrow {policy}": single_narrow(policy) for policy in NARROW}
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("key", KEYS)
def test_two_processes_are_one(
    ranks: list[dict[str, Any]], alone: dict[str, dict[str, Any]], key: str
) -> None:
    """Weights, moments, what the policy keeps, and events summed over the ranks, which every rank knows."""
    expected = alone[key.partition(" ")[2]]
    for rank, run in enumerate(joined([found[key] for found in ranks])):
        assert run["steps"] == STEPS
        for name, value in expected["weights"].items():
            assert_same(run["weights"][name], value, f"{name} on rank {rank}")
        codes = {k for k in run["kept"] if k.endswith("codes")}
        assert set(run["kept"]) - codes == set(expected["kept"])
        for name, value in expected["kept"].items():
            assert_same(run["kept"][name], value, f"{name} on rank {rank}")
        assert run["events"] == expected["events"]


@pytest.mark.parametrize("key", TAKEN_OVER)
def test_shards_of_a_plain_optimizer_are_taken_over(ranks: list[dict[str, Any]], key: str) -> None:
    """FSDP2's states of plain AdamW, under every policy: what a single process does with its own."""
    policy, dtype, kind = TAKEN_OVER[key]
    expected = taken_over(policy, dtype, kind, False)
    for rank, run in enumerate(joined([found[f"taken over: {key}"] for found in ranks])):
        assert run["steps"] == STEPS - STOP
        assert run["events"] == expected["events"]
        for part in ("weights", "kept"):
            assert run[part].keys() == expected[part].keys()
            for name, value in expected[part].items():
                assert_same(run[part][name], value, f"{name} on rank {rank}")


def test_runs_differ(alone: dict[str, dict[str, Any]]) -> None:
    """Every policy and grid leaves other weights, with something frozen and something moved."""
    firsts = [run["weights"]["first.weight"] for run in alone.values()]
    same = [(i, j) for i in range(len(firsts)) for j in range(i) if torch.equal(firsts[i], firsts[j])]
    assert same == []
    for grid in (*GRIDS, "narrow"):
        rows = [line.split() for line in alone[f"{grid} rne"]["events"][-1]]
        biases = grid == "narrow"  # whose own type is the grid
        expected = [n for n, _ in Uneven().named_parameters() if biases or n.endswith("weight")]
        assert [row[0] for row in rows] == expected
        assert 0 < sum(int(row[2]) for row in rows) < sum(int(row[1]) for row in rows)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "step",
            "parameter 'first.weight': grid int8 takes its scale from the whole tensor",
        ),
        ("columns", "parameter 'weight': placement"),
        ("file", "use torch.distributed.checkpoint"),
        ("whole", "exp_avg of parameter 'first.weight' whole, but the parameter is in shards"),
    ],
)
def test_what_shards_do_not_do(ranks: list[dict[str, Any]], what: str, says: str) -> None:
    """Refused when the write-back is made, on every rank."""
    for found in ranks:
        assert says in found["refusals"][what]


LAST_ACT = """
import sys, torch, torch.distributed as dist
from types import SimpleNamespace as Object
from torch.distributed.tensor import Shard
from halfulp.writeback.sharding import reduce_sum

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
group = dist.group.WORLD
sys.setswitchinterval(10)  # this thread keeps the lock
sharded = Object(to_local=None, placements=[Shard(0)], device_mesh=Object(get_group=lambda dim: group))
for _ in range(30):
    assert reduce_sum(torch.ones(3), sharded).tolist() == [2.0, 2.0, 2.0]
dist.destroy_process_group()
"""


def test_a_reduction_may_be_the_last_act(tmp_path: Path) -> None:
    """Of a script: torch by itself aborts now and then when the interpreter shuts down right after it."""
    for attempt in range(2):
        pair = [
            subprocess.Popen(
                [sys.executable, "-c", LAST_ACT, str(rank), str(tmp_path / f"store{attempt}")],
                env=os.environ | LOOPBACK, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        said = [process.communicate(timeout=300)[1] for process in pair]
        assert [process.returncode for process in pair] == [0, 0], said
