"""diffusers, a bf16 UNet with ``EMAModel``: both found, both fixed, resumed.

The average is kept in bfloat16 here, as ``EMAModel`` makes it from bf16 parameters; ``average_`` takes the
place of ``ema.step``.

    python examples/recipes/diffusers_ema.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

import halfulp as hu
from halfulp.writeback import average_

DECAY = 0.999


def make() -> tuple[UNet2DModel, EMAModel]:
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).bfloat16()  # fmt: skip
    return unet, EMAModel(unet.parameters(), decay=DECAY)


def train(
    unet: UNet2DModel, ema: EMAModel, optimizer: torch.optim.Optimizer, first: int, last: int, fixed: bool
) -> None:
    schedule = DDPMScheduler(num_train_timesteps=100)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step % 8)
        x, noise = (torch.randn(4, 3, 8, 8, generator=generator) for _ in range(2))
        when = torch.randint(0, 100, (4,), generator=generator)
        optimizer.zero_grad()
        told = unet(schedule.add_noise(x, noise, when).bfloat16(), when).sample
        torch.nn.functional.mse_loss(told.float(), noise).backward()
        optimizer.step()
        if fixed:
            average_(ema.shadow_params, unet.parameters(), DECAY, step=step)
        else:
            ema.step(unet.parameters())


def main(folder: Path) -> dict[str, Any]:
    unet, ema = make()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-5)
    with hu.Audit(optimizer, ["bf16"], model=unet, out=folder / "trace", also={"ema": ema.shadow_params}):
        train(unet, ema, optimizer, 0, 25, False)
    lost = shared.lost(folder / "trace")
    averages = hu.Trace.open(folder / "trace").roles["ema"].frozen("bf16")

    optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=unet)
    train(unet, ema, optimizer, 25, 40, True)
    torch.save(
        {"unet": unet.state_dict(), "ema": ema.shadow_params, "optimizer": optimizer.state_dict()},
        folder / "state.pt",
    )
    train(unet, ema, optimizer, 40, 50, True)

    again, again_ema = make()
    resumed = hu.WriteBack(torch.optim.AdamW(again.parameters(), lr=2e-5), "bf16", "sr", model=again)
    saved = torch.load(folder / "state.pt", weights_only=True)
    again.load_state_dict(saved["unet"])
    again_ema.shadow_params = saved["ema"]
    resumed.load_state_dict(saved["optimizer"])
    train(again, again_ema, resumed, 40, 50, True)
    shared.assert_equal(unet, again)
    assert all(torch.equal(a, b) for a, b in zip(ema.shadow_params, again_ema.shadow_params, strict=True))
    return {
        "audit": f"{lost:.0%} lost, of the EMA {float(averages[-1]):.0%}",
        "fix": "in mid-run, weights and EMA",
        "resume": "bit for bit, both",
    }


if __name__ == "__main__":
    shared.report(main)
