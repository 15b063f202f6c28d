"""Changes of shards, joined, are the change of the whole; one owner speaks for each piece. Four ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sync_ranks import STEPS, WORLD

import halfulp as hu
from halfulp.checkpoints import BlockFp8, Change, join, join_positions
from halfulp.checkpoints.sync.shards import Box, tiled

CASES: dict[str, dict[str, Any]] = {
    "fsdp": {}, "hsdp": {}, "rows": {}, "columns": {}, "both": {}, "replicated": {},
    "codes": {"grid": "e5m2"}, "blocks": {"grid": BlockFp8(block=5)},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parent.parent / "sync_ranks.py"
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(where)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
        )
        for rank in range(WORLD)
    ]
    said = [rank.communicate(timeout=240)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(said)
    return where


def of_ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}.{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_joined_changes_are_those_of_the_whole(name: str, folder: Path) -> None:
    """Places, values, density and bytes; a receiver follows them, and verifies every piece."""
    ranks = of_ranks(folder, name)
    whole = ranks[0]["whole"]
    held = {n: x.clone() for n, x in whole[0].items()}
    sync = hu.Sync(held, **CASES[name])
    copied = {n: x.clone() for n, x in sync.stored().items()}
    receiver = hu.Receiver(copied, position=join_positions([r["began"] for r in reversed(ranks)]))
    for step in range(STEPS):
        for n, x in whole[step + 1].items():
            held[n].copy_(x)
        expected = sync.take()
        parts = [Change.from_bytes(r["changes"][step]) for r in ranks]
        change = Change.from_bytes(join(parts[::-1]).to_bytes())
        assert (change.numel, change.changed) == (expected.numel, expected.changed)
        assert sum(part.changed for part in parts) == expected.changed  # one owner each
        assert set(change.parts) == set(expected.parts)
        for n, part in expected.parts.items():
            other = change.parts[n]
            assert (other.dtype, other.shape, other.form) == (part.dtype, part.shape, part.form)
            assert torch.equal(other.indices, part.indices)
            assert torch.equal(other.bits, part.bits)
        receiver.apply(change, verify=True)
        assert all(
            torch.equal(x.view(torch.uint8), copied[n].view(torch.uint8)) for n, x in sync.stored().items()
        )


@pytest.mark.parametrize("name", CASES)
def test_a_copy_begins_with_everything(name: str, folder: Path) -> None:
    ranks = of_ranks(folder, name)
    sync = hu.Sync(ranks[0]["whole"][0], **CASES[name])
    copied = {n: torch.zeros_like(x) for n, x in sync.stored().items()}
    full = join([Change.from_bytes(r["full"]) for r in ranks])
    assert {part.form for part in full.parts.values()} == {"all"}
    receiver = hu.Receiver(copied)
    receiver.apply(full, verify=True)
    assert all(
        torch.equal(x.view(torch.uint8), copied[n].view(torch.uint8)) for n, x in sync.stored().items()
    )
    receiver.apply(join([Change.from_bytes(r["changes"][0]) for r in ranks]))


def test_patches_of_one_rank_have_global_places(folder: Path) -> None:
    """So every owner may send its own."""
    ranks = of_ranks(folder, "both")
    before, after = ranks[0]["whole"][0]["w"].flatten().clone(), ranks[0]["whole"][1]["w"].flatten()
    for r in ranks:
        for patch in Change.from_bytes(r["changes"][0]).sparse_patches():
            if patch.name == "w":
                before.index_copy_(0, patch.indices.long(), patch.values)
    assert torch.equal(before, after)


def test_what_is_not_one_change_of_every_rank_is_refused(folder: Path) -> None:
    ranks = of_ranks(folder, "fsdp")
    first = [Change.from_bytes(r["changes"][0]) for r in ranks]
    second = [Change.from_bytes(r["changes"][1]) for r in ranks]
    for wrong, said in (
        (first[:1] + first[2:], "give the change of every rank"),
        ([*first, first[1]], "some of them twice"),
        ([*first, first[0]], "whole in several changes"),
        ([*first[:3], second[3]], "those of one sync"),
    ):
        with pytest.raises(hu.UsageError, match=said):
            join(wrong)
    with pytest.raises(hu.UsageError, match="not the positions of one sync"):
        join_positions([first[0].target, second[0].target])
    whole = ranks[0]["whole"]
    copied = {n: x.clone() for n, x in whole[0].items()}
    receiver = hu.Receiver(copied, position=join_positions([r["began"] for r in ranks]))
    with pytest.raises(hu.UsageError, match="from sync 1 to 2 is missing"):
        receiver.apply(join(second))
    receiver.apply(join(first), verify=True)
    copied["1.weight"][2, 3] += 1
    with pytest.raises(hu.CorruptionError, match=r"'1\.weight' would not be what the trainer holds"):
        receiver.apply(join(second), verify=True)


def test_refusals(folder: Path) -> None:
    said = torch.load(folder / "refusals.0.pt")
    assert "takes scales from values that other ranks may hold" in said["scales"]
    assert "cuts a block in two: shard by multiples of 4 rows" in said["cut"]
    assert "so its shards cannot be followed" in said["partial"]


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((4, 6), (0, 0), (2, 6)), Box((4, 6), (1, 0), (2, 6))],  # row 1 twice, row 3 never
        [Box((4, 6), (0, 0), (2, 3)), Box((4, 6), (0, 3), (2, 3)), Box((4, 6), (1, 0), (2, 6))],
        [Box((4, 6), (0, 0), (4, 3)), Box((4, 6), (0, 2), (4, 3))],
    ],
)
def test_shards_that_overlap_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(hu.UsageError, match="some of them twice"):
        tiled("w", boxes)


def test_shards_in_both_dimensions_tile() -> None:
    halves = [(0, 2), (2, 1), (3, 1)]
    tiled("w", [Box((4, 4), (a, b), (n, m)) for a, n in halves for b, m in halves])
    tiled("scalar", [Box((), (), ())])


@pytest.mark.parametrize(
    "box", [Box((4, 6), (1, 2), (3, 3)), Box((4, 6), (1, 0), (2, 6)), Box((5,), (2,), (3,))]
)
def test_places_in_the_whole(box: Box) -> None:
    """Against NumPy's slices."""
    whole = np.arange(int(np.prod(box.shape))).reshape(box.shape)
    assert box.flat(np.arange(box.numel)).tolist() == whole[box.slices].ravel().tolist()
