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
from packed_ranks import CASES as PACKED
from packed_ranks import ONE
from packed_ranks import STEPS as PACKED_STEPS
from packed_ranks import STOP as PACKED_STOP
from packed_ranks import run as run_packed
from writeback_distributed import joined

import halfulp as hu
from halfulp.writeback.storage.packed import pack_bits

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
    return {case: run(case, False) for case in CASES} | {
        f"packed {case}": run_packed(case, False) for case in PACKED
    }


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


def test_shards_that_cut_blocks_of_codes_are_refused(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """A block has one scale; which weights it has must not depend on the number of ranks."""
    for found in (rank for many in ranks.values() for rank in many):
        assert (
            "'first.weight' is a shard whose rows of 70 values are not whole blocks of 64" in found["refused"]
        )


# ---- packed codes -------------------------------------------------------------------------------------

Ranks = dict[int, list[dict[str, Any]]]


@pytest.mark.parametrize("case", PACKED)
def test_packed_shards_are_packed_whole_tensors(
    ranks: Ranks, alone: dict[str, dict[str, Any]], case: str
) -> None:
    """Codes, scales, moments, what policies keep, events, losses; also saved by two and taken up by three."""
    expected, grid = alone[f"packed {case}"], hu.grid(PACKED[case][0])
    for world, key, first in ((2, case, 0), (3, case, 0), (3, f"resumed {case}", PACKED_STOP)):
        for found in joined([rank["packed"][key] for rank in ranks[world]]):
            assert found["steps"] == PACKED_STEPS
            assert found["events"] == expected["events"][first:]
            for part in ("weights", "kept"):
                assert found[part].keys() == expected[part].keys()
                for name, value in expected[part].items():
                    have = found[part][name]
                    if name.endswith("halfulp.codes"):  # of shards they are saved by rows, a code a byte
                        have = pack_bits(have, grid.bits)
                    if name.endswith("halfulp.steps"):
                        have = have.reshape(-1)[: value.numel()]
                    assert_same(have, value, f"{name} on {world} ranks")
    moved = [int(row.split()[1]) - int(row.split()[2]) for row in expected["events"][-1][:-1]]
    assert any(moved)


def test_packed_shards_around_torch_are_one_pass(ranks: Ranks) -> None:
    for found in (rank["packed"] for many in ranks.values() for rank in many):
        assert set(found["both ways"].values()) == {True}, found["both ways"]
        assert [line.partition(":")[2] for line in found["told"]] == [
            " 3 of 3 tensors are stepped in two passes, which takes longer: maximize=True, an option "
            "that one pass does not have."
        ]


def test_between_steps_a_packed_shard_is_codes_and_codes_are_sent(ranks: Ranks) -> None:
    """Beside codes a rank holds a number a tensor, five a tile for events, and what is not managed."""
    for world, many in ranks.items():
        for found in (rank["packed"]["memory"] for rank in many):
            packed, container = found["packed"], found["None"]
            biases = sum(-(-n // world) for n in (33, 5, 1))  # FSDP2 pads them
            assert packed["floats"] <= 4 * (3 + biases) + 40 * packed["tiles"]
            assert container["floats"] >= 4 * container["weights"]
            assert packed["stored"] == packed["weights"] + 4 * 3
            longest = [-(-rows // world) * columns for rows, columns in ((33, 70), (5, 33), (1, 5))]
            assert packed["sent"] == world * sum(longest)
            assert container["sent"] == 4 * packed["sent"]


def test_packed_shards_under_fsdp2(ranks: Ranks) -> None:
    """Mixed precision, a model that has run before, a tensor that is unfrozen later: as in a container."""
    for found in (rank["packed"] for many in ranks.values() for rank in many):
        assert (found["in bfloat16"], found["after a forward"]) == (True, True)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("by hand", "parameter 'weight': storage='packed' on shards is for those of FSDP2"),
        ("offloaded", "parameter 'first.weight': storage='packed' does not go with CPUOffloadPolicy"),
        ("gathered", "FSDP2 holds it gathered at the moment"),
        ("off grid", f"parameter 'first.weight' is packed on grid {ONE}, but"),
        ("in place", "aten.zero_.default would write to a shard that is packed"),
    ],
)
def test_what_packed_shards_do_not_do(ranks: Ranks, what: str, says: str) -> None:
    for found in (rank["packed"] for many in ranks.values() for rank in many):
        assert says in found["refusals"][what]
