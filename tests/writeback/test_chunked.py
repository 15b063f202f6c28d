"""One pass in chunks: block scales, scalars and empty tensors, as in two passes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from onepass_models import adam, assert_same_dicts, both, give_gradients, kept_of, plain, sgd

import halfulp as hu
from halfulp.writeback import WriteBackOptions, two_passes
from halfulp.writeback.fused import chunked
from halfulp.writeback.fused import step as moving


def blocks_of(dtype: torch.dtype) -> torch.nn.Sequential:
    """Matrices of several pieces each, of eight rows or of 24; their last ones are short."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 33), torch.nn.Linear(32, 101)).to(dtype)


BLOCKS: dict[str, tuple[Any, str, str, str | None]] = {
    "rne, packed": (adam, "rne", "mxfp4", "packed"),
    "sr": (adam, "sr", "mxfp8_e4m3", None),
    "sr, packed": (adam, "sr", "mxfp6_e2m3", "packed"),
    "deadzone-sr": (adam, "deadzone-sr", "mxfp6_e3m2", None),
    "eco, packed": (adam, "eco", "int4/g16", "packed"),
    "kahan": (adam, "kahan", "mxfp4", None),
    "master, packed": (adam, "master", "mxfp8_e5m2", "packed"),
    "AdamW, not fused, eco": (plain, "eco", "int8/row", None),
    "SGD, not fused": (lambda m: sgd(m, fused=False), "sr", "mxfp4", "packed"),
    "SGD without momentum": (lambda m: sgd(m, momentum=0), "sr", "int8/row", None),
    "a scale a row": (adam, "rne", "int8/row", None),
    "a fixed scale, not a power of two": (adam, "sr", "int4@50", "packed"),
    "SGD, eco": (sgd, "eco", "mxfp4", None),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_one_pass_equals_two_for_block_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of 768 weights, so that there are some; sums of every second tile."""
    monkeypatch.setattr(chunked, "CHUNK", 768)
    monkeypatch.setattr(chunked, "OFTEN", 1)
    for module in (two_passes, moving, chunked):
        monkeypatch.setattr(module, "sampling", lambda _: 2)
    inner, policy, grid, storage = BLOCKS[name]
    both(inner, policy, grid, storage, torch.float32, blocks_of, route="one pass in chunks")


@pytest.mark.parametrize("kind", [adam, plain, sgd])
@pytest.mark.parametrize("grid", ["mxfp4", "int8/row"])
@pytest.mark.parametrize("shape", [(), (0, 64), (0,), (4, 0)])
def test_scalars_and_empty_tensors_in_chunks(shape: tuple[int, ...], grid: str, kind: Any) -> None:
    """A trainable scalar, or a tensor without elements, among the others: as in two passes."""
    models = [torch.nn.ParameterDict({"w": torch.ones(4, 64), "odd": torch.ones(shape)}) for _ in range(2)]
    opts = [
        hu.WriteBack(kind(m), grid, "sr", params=["w", "odd"], model=m, options=WriteBackOptions(one_pass=o))
        for m, o in zip(models, (True, False), strict=True)
    ]
    for step in range(3):
        for model, opt in zip(models, opts, strict=True):
            give_gradients(model, step)
            opt.step()
        assert opts[0].events.rows == opts[1].events.rows
    assert {chosen.name for chosen in opts[0].routes.values()} == {"one pass in chunks"}
    assert_same_dicts([models[0].state_dict()], [models[1].state_dict()])
    assert_same_dicts(kept_of(opts[0]), kept_of(opts[1]))


@pytest.mark.parametrize("grid", ["mxfp4", "int8/row", "int4@50"])
@pytest.mark.parametrize(
    "shape", [(1000, 1000), (7, 768), (3, 5, 640), (101,), (4097, 641), (0, 32), (32, 0)]
)
def test_pieces_are_whole_rows_and_tiles(grid: str, shape: tuple[int, ...]) -> None:
    found = list(chunked.chunks(hu.grid(grid), shape))
    assert [p.start for p in found] == [0, *(p.stop for p in found)][: len(found)]
    assert (found[-1].stop if found else 0) == math.prod(shape)
    assert all(p.start % 768 == 0 for p in found)
    scaling = hu.grid(grid).scaling
    if scaling is not None and scaling.per != "tensor":
        assert all(p.start % max(shape[-1], 1) == 0 for p in found)
        assert (found[-1].scales.stop if found else 0) == scaling.segments(shape)
