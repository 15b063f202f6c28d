"""What one rank of test_onepass_ranks.py does, and what a single process does for comparison.

Gradients are given, as shards of whole ones: a mean over three ranks would not be exact. As a program:
``onepass_ranks.py RANK WORLD FOLDER``; the last run is stopped half way by two ranks and taken up by three.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packed_ranks import as_rank, give_gradients
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from writeback_distributed import Uneven, line, outcome, sharded

import halfulp as hu
from halfulp.writeback import Kahan, WriteBackOptions

STEPS, STOP = 6, 3
CASES: dict[str, tuple[str, Any, torch.dtype, dict[str, Any]]] = {
    "sr, bf16 moments": ("bf16", "sr", torch.bfloat16, {"moments": "bf16"}),
    "kahan": ("bf16", Kahan(torch.bfloat16), torch.bfloat16, {}),
    "remainder16": ("bf16", "remainder16", torch.bfloat16, {}),
    "remainder8, bf16 moments": ("bf16", "remainder8", torch.bfloat16, {"moments": "bf16"}),
    "e4m3 in float32": (
        "e4m3@128", "sr", torch.float32, {"moments": "bf16", "select": lambda _n, _p: True},
    ),
    "remainder8, moments of eight bits": ("bf16", "remainder8", torch.bfloat16, {"moments": "int8"}),
    "tile masters": ("bf16", "tiles", torch.bfloat16, {}),  # in two passes
}  # fmt: skip
TILE = 50  # shards are cut within tiles
BLOCKS = (128, 64, 64)  # rows of whole blocks, as moments of eight bits want them


def model_of(case: str, distributed: bool) -> torch.nn.Module:
    _, _, dtype, options = CASES[case]
    model = Uneven(BLOCKS) if options.get("moments") == "int8" else Uneven()
    return sharded(dtype, model) if distributed else model.to(dtype)


def refused() -> str:
    """Rows that are not whole blocks."""
    try:
        hu.AdamW(sharded(torch.bfloat16).named_parameters(), moments="int8")
    except hu.UsageError as error:
        return str(error)
    return "nothing"


def made(model: torch.nn.Module, case: str) -> hu.WriteBack:
    grid, policy, _, options = CASES[case]
    named = model.named_parameters()
    if policy == "tiles":
        masks = {n: torch.arange(-(-p.numel() // TILE)) % 2 == 0 for n, p in model.named_parameters()}
        inner = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
        return hu.WriteBack(inner, grid, hu.TileMaster(masks, tile=TILE), model=model, seed=2)
    return hu.AdamW(named, lr=5e-3, weight_decay=0.1, grid=grid, policy=policy, seed=2, **options)


def steps(model: torch.nn.Module, opt: hu.WriteBack, first: int, last: int) -> list[list[str]]:
    seen = []
    for step in range(first, last):
        give_gradients(model, step)
        opt.step()
        seen.append([line(row) for row in opt.events.rows])
    return seen


def run(case: str, distributed: bool) -> dict[str, Any]:
    model = model_of(case, distributed)
    opt = made(model, case)
    return outcome(model, opt, steps(model, opt, 0, STEPS))


def first_half(case: str, place: Path) -> None:
    model = model_of(case, True)
    opt = made(model, case)
    steps(model, opt, 0, STOP)
    model.zero_grad()
    a, b = get_state_dict(model, opt)
    dcp.save({"model": a, "opt": b}, checkpoint_id=place)


def second_half(case: str, place: Path) -> dict[str, Any]:
    model = model_of(case, True)
    opt = made(model, case)
    a, b = get_state_dict(model, opt)
    dcp.load({"model": a, "opt": b}, checkpoint_id=place)
    set_state_dict(model, opt, model_state_dict=a, optim_state_dict=b)
    return outcome(model, opt, steps(model, opt, STOP, STEPS))


def both_ways() -> bool:
    """Around torch's fused step one pass is what two passes are, on shards as well."""
    found = []
    for once in (True, False):
        model = sharded(torch.bfloat16)
        inner = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, fused=True)
        opt = hu.WriteBack(inner, "bf16", "sr", model=model, options=WriteBackOptions(one_pass=once))
        found.append(outcome(model, opt, steps(model, opt, 0, STEPS)))
    a, b = found
    same = all(torch.equal(a[part][k], b[part][k]) for part in ("weights", "kept") for k in a[part])
    return same and a["kept"].keys() == b["kept"].keys() and a["events"] == b["events"]


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=100),
    )  # fmt: skip
    found: dict[str, Any] = {case: run(case, True) for case in CASES}
    found["both ways"], found["refused"] = both_ways(), refused()
    found["packed"] = as_rank(world, folder)
    for case in CASES:
        place = folder / f"checkpoint {case}"
        if world == 2:
            first_half(case, place)
        else:
            found[f"resumed {case}"] = second_half(case, place)
    torch.save(found, folder / f"rank{rank} of {world}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
