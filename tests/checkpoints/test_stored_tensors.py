"""Which file a tensor is read from, and what is said of files that are damaged or hold something else."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import halfulp as hu
from halfulp.checkpoints.stored_tensors import opened

ONES = {"a.weight": torch.ones(8, 8).bfloat16(), "b.weight": torch.ones(8, 8).bfloat16()}
STALE = {"a.weight": torch.full((8, 8), 3.0).bfloat16()}


def sharded(folder: Path, parts: dict[str, dict[str, torch.Tensor]], places: dict[str, str]) -> Path:
    """A folder of shards, with an index that says where each tensor is."""
    folder.mkdir()
    for file, held in parts.items():
        save: Any = save_file if file.endswith("safetensors") else torch.save
        save(held, folder / file)
    name = "model.safetensors" if next(iter(parts)).endswith("safetensors") else "pytorch_model.bin"
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_a_tensor_is_read_from_the_file_that_the_index_gives(end: str, tmp_path: Path) -> None:
    """Another file holds a stale one, and a tensor that the index does not name."""
    parts = {f"m1.{end}": {"a.weight": ONES["a.weight"]}, f"m2.{end}": {**ONES, **STALE, "c": torch.ones(2)}}
    places = {"a.weight": f"m1.{end}", "b.weight": f"m2.{end}"}
    folder = sharded(tmp_path / "stale", parts, places)
    found = hu.check(folder, 1e-5)
    assert (found.weights, [t.name for t in found.tensors]) == (128, ["a.weight", "b.weight"])
    assert hu.diff(ONES, folder).total.same == 128


@pytest.mark.parametrize("end", ["safetensors", "bin"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_tensor_that_its_file_does_not_hold_is_damage(end: str, elsewhere: bool, tmp_path: Path) -> None:
    parts = {f"m1.{end}": {"a.weight": ONES["a.weight"]}, f"m2.{end}": ONES if elsewhere else STALE}
    places = {"a.weight": f"m2.{end}", "b.weight": f"m1.{end}"}
    folder = sharded(tmp_path / "missing", parts, places)
    with pytest.raises(
        hu.CorruptionError, match=rf"do not hold, such as 'b\.weight', which m1\.{end} should"
    ):
        hu.check(folder, 1e-5)


def test_a_tensor_larger_than_its_file_is_not_copied_out(tmp_path: Path) -> None:
    """One value that was expanded to 40 TB."""
    torch.save({"w": torch.ones(4, 4), "big": torch.ones(1).expand(10**13)}, tmp_path / "m.pt")
    found = hu.check(tmp_path / "m.pt", 1e-5)
    assert ([t.name for t in found.tensors], list(found.skipped)) == (["w"], ["big"])
    assert hu.diff({"w": torch.ones(4, 4)}, tmp_path / "m.pt").total.same == 16


def test_an_index_with_a_name_twice_is_damage(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "twice", {"m1.safetensors": ONES}, {"a.weight": "m1.safetensors"})
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a.weight": "m1.safetensors", "a.weight": "m2.safetensors"}}')
    with pytest.raises(hu.CorruptionError, match=r"the key a\.weight is there twice"):
        hu.check(folder, 1e-5)


def test_variants_in_a_folder_are_not_counted_with_the_model(tmp_path: Path) -> None:
    """``model.safetensors`` is the checkpoint; without it, files that share a name are refused."""
    save_file(ONES, tmp_path / "model.safetensors")
    save_file({**STALE, "c": torch.ones(2)}, tmp_path / "model.fp16.safetensors")
    found = hu.check(tmp_path, 1e-5)
    assert (found.weights, hu.diff(ONES, tmp_path).total.same) == (128, 128)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(hu.UsageError, match=r"twice \(in model\.fp16\.safetensors and other\.safetensors\)"):
        hu.check(tmp_path, 1e-5)
    save_file({"c": torch.ones(2)}, tmp_path / "model.fp16.safetensors")
    assert hu.check(tmp_path, 1e-5).weights == 130


def test_tensors_without_plain_values_are_skipped(tmp_path: Path) -> None:
    held = {
        "w": torch.ones(4), "sparse": torch.ones(2, 2).to_sparse(), "meta": torch.ones(2, device="meta"),
        "complex": torch.ones(2, dtype=torch.complex64),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }  # fmt: skip
    torch.save(held, tmp_path / "odd.pt")
    for place in (tmp_path / "odd.pt", held):
        found = hu.check(place, 1e-5)
        assert [t.name for t in found.tensors] == ["w"]
        assert set(found.skipped) == set(held) - {"w"}
        assert found.skipped["sparse"] == "sparse_coo float32 is not a type of weights that is known here"
        assert set(hu.diff(place, place).skipped) == set(found.skipped)


def test_damaged_files_of_torch_are_not_called_python_objects(tmp_path: Path) -> None:
    whole, old = tmp_path / "whole.pt", tmp_path / "old.pt"
    torch.save({"w": torch.ones(64, 64)}, whole)
    torch.save({"w": torch.ones(64, 64)}, old, _use_new_zipfile_serialization=False)
    for content in (whole.read_bytes(), old.read_bytes()):
        for size in (0, 2, 100, len(content) // 2, len(content) - 1):
            (tmp_path / "cut.pt").write_bytes(content[:size])
            with pytest.raises(hu.CorruptionError, match="is damaged, or is no file of"):
                hu.check(tmp_path / "cut.pt", 1e-5)
    torch.save({"w": torch.ones(2), "args": argparse.Namespace()}, tmp_path / "objects.pt")
    with pytest.raises(
        hu.UsageError, match=r"holds Python objects \(argparse\.Namespace\), which halfulp does"
    ):
        hu.check(tmp_path / "objects.pt", 1e-5)
    with opened(whole) as tensors:
        assert list(tensors) == ["w"]
