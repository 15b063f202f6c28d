"""Packed codes on shards: what a rank of test_onepass_ranks.py does with them, and what one process does.

Every step has a forward and a backward on the same batch, whose loss is kept; then gradients are given, as
shards of whole ones: a mean over three ranks would not be exact.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from writeback_distributed import Uneven, adamw, batch, line, outcome, sharded

import halfulp as hu
from halfulp.kernels import tiles_of
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.sharding import local, packed_shard

STEPS, STOP = 4, 2
ONE = "e4m3@128"
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    f"{ONE} sr, one pass": (ONE, "sr", {"moments": "bf16"}),
    # around torch's AdamW, in two passes, whose kernels other tests compile as well
    **{f"{ONE} {policy}": (ONE, policy, {}) for policy in ("rne", "sr", "eco", "kahan", "master")},
    **{
        f"{grid} {policy}": (grid, policy, {})
        for grid, policy in {
            "int8@128": "sr", "int8@100": "sr", "e2m1@16": "kahan", "int4@32": "master", "int3@16": "sr",
            "bf16": "rne", "int8/row": "sr", "mxfp4": "rne",
        }.items()
    },
}  # fmt: skip


def packed(model: torch.nn.Module, case: str) -> hu.WriteBack:
    grid, policy, options = CASES[case]
    kept: dict[str, Any] = {"grid": grid, "policy": policy, "model": model, "storage": "packed", "seed": 2}
    if options:
        # All of them: what is not managed torch steps itself, and the ends of shards otherwise.
        kept["select"] = lambda _name, _p: True
        return hu.AdamW(model.named_parameters(), lr=5e-3, weight_decay=0.1, **kept, **options)
    return hu.WriteBack(adamw(model), **kept)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    """The same whole gradients whatever the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        whole = (torch.randn(p.shape, generator=generator) * 1e-2).to(p.dtype)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    found: torch.Tensor = (model(x) - y).square().mean()
    return found


def steps(model: torch.nn.Module, opt: hu.WriteBack, first: int, last: int) -> list[Any]:
    seen = []
    for step in range(first, last):
        loss = loss_of(model, step)
        loss.backward()
        give_gradients(model, step)
        opt.step()
        seen.append([*(line(row) for row in opt.events.rows), loss.item().hex()])
    return seen


def run(case: str, distributed: bool) -> dict[str, Any]:
    model = sharded() if distributed else Uneven()
    opt = packed(model, case)
    return outcome(model, opt, steps(model, opt, 0, STEPS))


def first_half(case: str, place: Path) -> None:
    model = sharded()
    opt = packed(model, case)
    steps(model, opt, 0, STOP)
    a, b = get_state_dict(model, opt)
    dcp.save({"model": a, "opt": b}, checkpoint_id=place)


def second_half(case: str, place: Path) -> dict[str, Any]:
    model = sharded()
    opt = packed(model, case)
    a, b = get_state_dict(model, opt)
    dcp.load({"model": a, "opt": b}, checkpoint_id=place)
    set_state_dict(model, opt, model_state_dict=a, optim_state_dict=b)
    return outcome(model, opt, steps(model, opt, STOP, STEPS))


# ---- around torch's fused step ------------------------------------------------------------------------


def both_ways() -> dict[str, bool]:
    """One pass, two passes and a container, all on shards, with torch's fused arithmetic."""
    found = []
    ways: tuple[dict[str, Any], ...] = (
        {"storage": "packed"},
        {"storage": "packed", "options": WriteBackOptions(one_pass=False)},
        {},
    )
    for options in ways:
        model = sharded()
        inner = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, fused=True)
        opt = hu.WriteBack(inner, ONE, "sr", model=model, **options)
        found.append(outcome(model, opt, steps(model, opt, 0, STEPS)))
        assert all(route.one_pass == opt.one_pass for route in opt.routes.values())
    a, b, c = found
    return {
        "one pass is two": same(a["kept"], b["kept"]),
        **{f"{part}, two passes": same(a[part], b[part]) for part in ("weights", "events")},
        **{f"{part}, container": same(a[part], c[part]) for part in ("weights", "events")},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    return bool(a == b)


def told() -> list[str]:
    """What is said of a fused step that cannot be one pass, in three steps."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # for this test
    logging.getLogger("halfulp").addHandler(handler)
    model = sharded()
    inner = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True, maximize=True)
    steps(model, hu.WriteBack(inner, ONE, "rne", model=model, storage="packed"), 0, 3)
    logging.getLogger("halfulp").removeHandler(handler)
    return said


# ---- what stays, and what is sent ---------------------------------------------------------------------


def floats() -> int:
    """Bytes of all memory that tensors of floating point are in, once gloo has let go of what it has sent.

    Its threads may hold a tensor after a reduction has returned, some until they have the next task: each is
    given one that is of whole numbers, and the least of several looks counts.
    """
    looks = []
    for task in [dist.barrier(async_op=True) for _ in range(4)]:
        task.wait()
    for _ in range(10):
        gc.collect()
        alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and type(x) is not DTensor]
        stores = [x.untyped_storage() for x in alive if x.is_floating_point()]
        looks.append(sum({s._cdata: s.nbytes() for s in stores}.values()))
        time.sleep(0.02)
    return min(looks)


def memory(storage: Any) -> dict[str, int]:
    """Of a run that keeps no moments, between steps; nothing else is alive."""
    before = floats()
    model = sharded()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hu.WriteBack(
        sgd, ONE, "rne", model=model, storage=storage, options=WriteBackOptions(telemetry=False)
    )
    steps(model, opt, 0, 2)
    model.state_dict()
    opt.zero_grad()
    sizes = [local(s.p).numel() for s in opt.slots]
    sent = [
        [p.numel() * p.element_size() for p in record.all_gather_outputs]
        for record in packed_shard._records(model)
        if id(record.sharded_param) in {id(s.p) for s in opt.slots}
    ]
    return {
        "floats": floats() - before,
        "weights": sum(sizes),
        "tiles": sum(map(tiles_of, sizes)),
        "stored": opt.bytes().weights,
        "sent": sum(map(sum, sent)),
    }


# ---- other ways to come here --------------------------------------------------------------------------


def computed_in_bfloat16() -> bool:
    """FSDP2's mixed precision: gathered weights are cast as they would be from a container. Also on a mesh of
    replicas and shards."""
    found = []
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicas", "shards"))
    for storage in ("packed", None):
        model = Uneven()
        for part in (model.first, model):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        opt = hu.WriteBack(adamw(model), ONE, "sr", model=model, storage=storage, seed=2)  # type: ignore[arg-type]
        found.append(outcome(model, opt, steps(model, opt, 0, STEPS)))
    return all(same(found[0][part], found[1][part]) for part in ("weights", "events"))


def after_a_forward() -> bool:
    """The model has been run, and a tensor is unfrozen later: FSDP2 has room for values by then."""
    found = []
    for storage in ("packed", None):
        model = sharded()
        model.second.weight.requires_grad_(False)
        loss_of(model, 0).backward()
        opt = hu.WriteBack(adamw(model), ONE, "sr", model=model, storage=storage, seed=2)  # type: ignore[arg-type]
        seen = steps(model, opt, 0, 1)
        opt.zero_grad()
        model.second.weight.requires_grad_(True)
        found.append(outcome(model, opt, seen + steps(model, opt, 1, STEPS)))
        assert len(opt.slots) == 3
    return all(same(found[0][part], found[1][part]) for part in ("weights", "events"))


def refusals() -> dict[str, str]:
    """What packed shards do not do, and what is said."""

    def by_hand() -> None:
        odd = torch.nn.Module()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        odd.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        made(odd)

    def offloaded() -> None:
        model = Uneven()
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        made(model)

    def gathered() -> None:
        model = sharded()
        optimizer = adamw(model)
        model.unshard()
        hu.WriteBack(optimizer, ONE, "rne", params=lambda _n, p: p.dim() == 2, model=model, storage="packed")

    def off_grid() -> None:
        model = sharded()
        made(model)
        state = model.state_dict()
        state["first.weight"].to_local().fill_(0.3)
        model.load_state_dict(state)

    def in_place() -> None:
        model = sharded()
        made(model)
        p = model.first.weight
        said = []
        for x in (p, p.data, p.detach(), p.detach().to_local(), p.detach().to_local().view(-1)):
            try:
                with torch.no_grad():
                    x.zero_()
            except hu.UsageError as error:
                said.append(error)
        if len(said) == 5:
            raise said[0]

    def made(model: torch.nn.Module) -> hu.WriteBack:
        return hu.WriteBack(adamw(model), ONE, "sr", model=model, storage="packed")

    tries: dict[str, Callable[[], Any]] = {
        "by hand": by_hand, "offloaded": offloaded, "gathered": gathered, "off grid": off_grid,
        "in place": in_place,
    }  # fmt: skip
    said = {}
    for name, call in tries.items():
        try:
            call()
        except hu.HalfulpError as error:
            said[name] = str(error)
    return said


def as_rank(world: int, folder: Path) -> dict[str, Any]:
    """All of it, as one rank of two or of three."""
    gc.freeze()  # what is there so far: to look through it at every collection takes seconds
    found: dict[str, Any] = {"memory": {str(storage): memory(storage) for storage in ("packed", None)}}
    for case in CASES:
        found[case] = run(case, True)
        place = folder / f"checkpoint packed {case.replace('/', ' ')}"
        if world == 2:
            first_half(case, place)
        else:
            found[f"resumed {case}"] = second_half(case, place)
    found |= {
        "both ways": both_ways(), "told": told(), "in bfloat16": computed_in_bfloat16(),
        "after a forward": after_a_forward(), "refusals": refusals(),
    }  # fmt: skip
    return found
