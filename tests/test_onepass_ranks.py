"""Two and three processes are one, in one pass: sharded tensors give the weights of a single process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import launch
from onepass_ranks import CASES, STEPS, STOP, TILE, run
from oracle import assert_same
from writeback_distributed import joined

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available() or sys.platform == "win32",
        reason="needs gloo",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]


def launched(world: int, folder: Path) -> list[dict[str, Any]]:
    launch("onepass_ranks.py", world, folder)
    return [torch.load(folder / f"rank{r} of {world}.pt", weights_only=True) for r in range(world)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """One process. It comes first, so that kernels are compiled once and not by every rank."""
    return {case: run(case, False) for case in CASES}


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, alone: dict[str, dict[str, Any]]
) -> dict[int, list[dict[str, Any]]]:
    """What each of two and of three processes found; the three take up what the two saved."""
    folder = tmp_path_factory.mktemp("ranks")
    return {world: launched(world, folder) for world in (2, 3)}


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_one_process(
    ranks: dict[int, list[dict[str, Any]]], alone: dict[str, dict[str, Any]], case: str
) -> None:
    """Weights, moments, what policies keep and events; norms and biases of one dimension included."""
    expected = alone[case]
    made = [(2, case, 0), (3, case, 0), (3, f"resumed {case}", STOP)]
    runs = [
        (world, run, first)
        for world, key, first in made
        for run in joined([found[key] for found in ranks[world]])
    ]
    for world, found, first in runs:
        assert found["steps"] == STEPS
        for part in ("weights", "kept"):
            assert found[part].keys() == expected[part].keys()
            for name, value in expected[part].items():
                have = found[part][name]
                if case == "tile masters" and name.endswith("master"):  # a shard's lie where they belong
                    have = have.reshape(-1)[_chosen(have.numel())]
                assert_same(have, value, f"{name} on {world} ranks")
        assert found["events"] == expected["events"][first:]
    names = {row.split()[0] for row in expected["events"][-1]}
    assert "first.bias" in names


def _chosen(numel: int) -> torch.Tensor:
    return torch.arange(numel) // TILE % 2 == 0


def test_around_torch_shards_are_stepped_as_in_two_passes(ranks: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["both ways"] for many in ranks.values() for found in many)
