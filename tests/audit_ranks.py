"""One rank of a training run that is audited: ``audit_ranks.py MODE FOLDER RANK WORLD``.

``single`` is the run without ranks that ``ddp`` and ``fsdp`` must equal; all ranks see the same batches.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from audit_reference import MLP, STATIC, batches

import halfulp as hu

MOVING = ["int8/row", "int4/g32", "mxfp4"]
REHEARSED = ["e5m2", "bf16:sr", "bf16:kahan", "int8/row"]
STEPS = 5
SQUARES = ("weight_sq", "proposal_sq", "expected")
ARRIVED = ("arrived", "written_sq")
FLOAT_SUMS = (*SQUARES, *ARRIVED)
"""Columns that are added up over shards, and so in another order where there are others."""


class Model(MLP):
    """With a tensor that only one of two ranks has anything of."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def evaluate(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(model(torch.linspace(-1, 1, 160).reshape(10, 16)).square().mean())


def averaged(model: torch.nn.Module, world: int) -> None:
    """Gradients as FSDP2 should leave them: over gloo, torch 2.8 adds them up and does not divide. Of a power
    of two ranks with the same batches, dividing is exact."""
    if torch.__version__.startswith("2.8."):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(world)


def refusals(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> list[str]:
    """What an audit says of things that shards cannot do."""
    said = []
    for options in ({"grids": ["int8"]}, {"grids": ["nvfp4"]}, {"scores": ("bf16", 1, 2)}):
        grids = options.pop("grids", ["bf16"])
        audit = hu.Audit(optimizer, grids, model=model, out=folder / f"refused{len(said)}", **options)
        audit.start()
        try:
            optimizer.step()
        except hu.UsageError as error:
            said.append(str(error))
        finally:
            audit.stop()
    return said


def main(mode: str, folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    ema = copy.deepcopy(model).requires_grad_(False)
    if mode != "single":
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=world)
    if mode == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (world,))
        for net in (model, ema):
            for layer in (net.fc1, net.fc2, net.head):
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    whole = hu.Audit(
        optimizer, STATIC, model=model, out=folder / mode, decay=True, part_steps=2, rehearse=REHEARSED
    )
    matrices = hu.Audit(
        optimizer, MOVING, model=model, out=folder / f"{mode}-moving", params=lambda _, p: p.dim() >= 2,
        states=True, also={"ema": ema},
    )  # fmt: skip
    sampled = hu.Audit(optimizer, ["bf16"], model=model, out=folder / f"{mode}-sampled", sample=0.5)
    generator = batches()
    with whole, matrices, sampled:
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(8, 16, generator=generator)
            loss = torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
            loss.backward()
            if mode == "fsdp":
                averaged(model, world)
            whole.log(loss)
            optimizer.step()
            with torch.no_grad():
                for average, weight in zip(ema.parameters(), model.parameters(), strict=True):
                    average.lerp_(weight, 0.01)
        for spec in REHEARSED:
            whole.evaluate(lambda: evaluate(model), specs=[spec])
            whole.save_as_if(spec, folder / f"{spec.replace('/', '-')}.safetensors")
    if mode == "fsdp":
        said = refusals(model, optimizer, folder)
        (folder / f"refused.{rank}").write_text("\n".join(said))
    if mode != "single":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
