"""Lightning, ``precision="bf16-true"``: found, fixed from the plain run's checkpoint, resumed.

python examples/recipes/lightning_trainer.py

Checkpoints are saved at the end of epochs. After one that ``every_n_train_steps`` saved at the last batch of
an epoch, Lightning 2.6 counts one epoch less in what the resumed run saves, and a sampler that shuffles by
epoch repeats an order when that is resumed: ``tests/integrations/test_recipes.py`` shows it without halfulp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import halfulp as hu
from halfulp.integrations.lightning import AuditCallback


class Module(LightningModule):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        return (self.net(batch) - batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        return hu.WriteBack(optimizer, "bf16", "sr", model=self) if self.fixed else optimizer


def loader() -> Any:
    x = torch.randn(128, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    return torch.utils.data.DataLoader(x, batch_size=8)


def fit(folder: Path, *, fixed: bool, start: Path | None = None, callbacks: Any = ()) -> Module:
    seed_everything(0, verbose=False)
    save = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=4, save_top_k=-1)
    ranks = shared.ranks()
    trainer = Trainer(
        max_epochs=12, accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto",
        precision="bf16-true", default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[save, *callbacks],
    )  # fmt: skip
    module = Module(fixed)
    trainer.fit(module, loader(), ckpt_path=None if start is None else str(start))
    return module


def loss(module: Module) -> float:
    with torch.no_grad():
        return sum(module.bfloat16().training_step(x, 0).item() for x in loader()) / 16


def main(folder: Path) -> dict[str, Any]:
    plain = fit(folder / "plain", fixed=False, callbacks=[AuditCallback(["bf16"])])
    lost = shared.lost(folder / "plain" / "halfulp")
    found = Module(False)
    found.load_state_dict(torch.load(folder / "plain" / "epoch=3.ckpt", weights_only=True)["state_dict"])
    fixed = fit(folder / "fixed", fixed=True, start=folder / "plain" / "epoch=3.ckpt")
    assert loss(fixed) < loss(plain)
    again = fit(folder / "again", fixed=True, start=folder / "fixed" / "epoch=7.ckpt")
    shared.assert_equal(fixed, again)
    shown = {
        "audit": f"{lost:.0%} lost",
        "fix": f"loss {loss(found):.4f} after 4 epochs; after 12 {loss(plain):.4f} plain, "
        f"{loss(fixed):.4f} fixed",
        "resume": "bit for bit",
    }
    return shown | shared.ranks_agree(fixed)


if __name__ == "__main__":
    shared.report(main)
