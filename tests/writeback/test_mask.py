"""Masks of tiles: saved, loaded and used; and what is not one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import halfulp as hu
from halfulp import files, tensors
from halfulp.allocation.masks import (
    tile_sizes,
)
from halfulp.errors import CorruptionError, UsageError, VersionError


def test_what_is_not_a_mask(tmp_path: Path) -> None:
    good = hu.Mask(tiles={"w": torch.ones(2, dtype=torch.bool)}, sizes={"w": 1000}, score="P", budget=4000)
    good.save(tmp_path / "good")
    (tmp_path / "garbage").write_bytes(b"\0" * 100)
    (tmp_path / "short").write_bytes((tmp_path / "good").read_bytes()[:-1])
    save_file({"w": torch.ones(2)}, tmp_path / "foreign")
    replaced = (tmp_path / "good").read_bytes().replace(b'\\"w\\": 1000', b'\\"w\\": 9000')
    (tmp_path / "other sizes").write_bytes(replaced)
    files.put(tmp_path / "newer", tensors.content(good.tiles, {"halfulp.mask": '{"format": 9}'}))
    for name in ("garbage", "short", "foreign", "other sizes", "missing"):
        with pytest.raises(CorruptionError, match=name):
            hu.Mask.load(tmp_path / name)
    with pytest.raises(VersionError, match="format 9"):
        hu.Mask.load(tmp_path / "newer")


def test_old_masks_have_tiles_of_768(tmp_path: Path) -> None:
    """The first format says no size; the second always does, and is sealed."""
    old = Path(__file__).parents[1] / "fixtures" / "format_1" / "mask.safetensors"
    assert b"tile" not in old.read_bytes()
    assert hu.Mask.load(old).tile == 768
    mask = hu.Mask(tiles={"w": torch.ones(2, dtype=torch.bool)}, sizes={"w": 1000}, score="P", budget=4000)
    mask.save(tmp_path / "new")
    assert hu.Mask.load(tmp_path / "new").tile == 768
    sized = hu.Mask(tiles=mask.tiles, sizes=mask.sizes, score="P", budget=4000, tile=500)
    sized.save(tmp_path / "sized")
    said = (tmp_path / "sized").read_bytes()
    for wrong in (b"400", b'\\"a', b"-10", b"1.5", b"  0"):
        (tmp_path / "wrong").write_bytes(said.replace(b": 500", b": " + wrong))
        with pytest.raises(CorruptionError, match="wrong"):
            hu.Mask.load(tmp_path / "wrong")


def test_tile_sizes() -> None:
    assert tile_sizes(768).tolist() == [768]
    assert tile_sizes(769).tolist() == [768, 1]


@pytest.mark.parametrize(
    ("tiles", "sizes", "budget", "said"),
    [
        (torch.ones(2, dtype=torch.bool), 1000, 3999, "above its budget of 3,999"),
        (torch.ones(2), 1000, 4000, "expected 2 booleans"),
        (torch.ones(1, dtype=torch.bool), 1000, 4000, "expected 2 booleans"),
        (torch.ones(2, dtype=torch.bool), 1000, -1, "whole number"),
    ],
)
def test_masks_that_cannot_be(
    tmp_path: Path, tiles: torch.Tensor, sizes: int, budget: int, said: str
) -> None:
    document = {"format": 2, "score": "P", "budget": budget, "sizes": {"w": sizes}, "tile": 768}
    files.put(tmp_path / "mask", tensors.content({"w": tiles}, {"halfulp.mask": json.dumps(document)}))
    with pytest.raises(CorruptionError, match=said):
        hu.Mask.load(tmp_path / "mask")
    if budget >= 0:
        with pytest.raises(UsageError, match=said):
            hu.Mask(tiles={"w": tiles}, sizes={"w": sizes}, score="P", budget=budget).save(tmp_path / "x")


def test_a_byte_that_is_no_boolean(tmp_path: Path) -> None:
    content = bytearray(
        (Path(__file__).parents[1] / "fixtures" / "format_1" / "mask.safetensors").read_bytes()
    )
    content[-1] = 255
    (tmp_path / "mask").write_bytes(content)
    with pytest.raises(CorruptionError, match="neither true nor false"):
        hu.Mask.load(tmp_path / "mask")
