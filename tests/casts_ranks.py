"""One rank of casts from float32 main parameters that are shards: ``casts_ranks.py FOLDER RANK WORLD``.

With a world of one, whole tensors: what the shards of several must add up to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import halfulp as hu

SHAPES = {"a": (37, 24), "b": (1, 50), "c": (300, 11)}
"""The second has nothing on one of two ranks."""


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks{world}", rank=rank, world_size=world)
    mesh = dist.init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(0)

    def placed(x: torch.Tensor) -> torch.Tensor:
        return x if world == 1 else distribute_tensor(x, mesh, [Shard(0)])

    whole = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}
    main_ = {name: placed(x.bfloat16().float()) for name, x in whole.items()}
    stored = {name: placed(x.bfloat16()) for name, x in whole.items()}
    optimizer = torch.optim.AdamW([x.requires_grad_() for x in main_.values()], lr=3e-4, foreach=False)
    with hu.CastAudit(main_, stored, ["bf16", "e4m3@16"], out=folder / f"world{world}", every=2):
        for _ in range(5):
            for name, x in main_.items():
                x.grad = placed(torch.randn(SHAPES[name], generator=generator))
            optimizer.step()
            with torch.no_grad():
                for name, x in stored.items():
                    x.copy_(main_[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
