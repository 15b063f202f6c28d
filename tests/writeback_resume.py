"""A training run that can stop and go on: shared by test_writeback_resume.py and the processes it starts.

Run as a program with a folder, it takes up every checkpoint there, trains on to the last step, and leaves
``log.json``: for every checkpoint and step a digest of all that there is.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from writeback_models import Tied, adamw, loss_of, masks

import halfulp as hu
from halfulp.writeback import ECO, Kahan, Master, load, save

STEPS, STOPS = 12, (1, 8)
FORMATS = ("torch", "safetensors", "distributed")
OVERFLOW = 6  # the step whose loss the scaler has to skip

POLICIES: dict[str, tuple[str, Any]] = {
    "rne": ("e4m3@16", "rne"),
    "sr": ("e4m3@16", "sr"),
    "deadzone-sr": ("e4m3@16", "deadzone-sr"),
    "eco": ("e4m3@16", "eco"),
    "eco stochastic": ("e4m3@16", ECO(rounding="stochastic", decay_exact=True)),
    "kahan": ("e4m3@16", "kahan"),
    "kahan in bfloat16": ("e4m3@16", Kahan(torch.bfloat16)),
    "master": ("e4m3@16", "master"),
    "master from raw": ("e4m3@16", Master("raw")),
    "some tiles": ("e4m3@16", "some tiles"),
    "blocks": ("mxfp4", "sr"),
    "dqt": ("int3/dqt", "dqt"),
    "absmean": ("int4/absmean", "sr"),
}
CASES = [
    f"{policy}, {storage}"
    for policy in POLICIES
    for storage in ("container", "native", "packed")
    if not (storage == "native" and policy in ("dqt", "absmean"))  # bfloat16 does not hold their values
]


@contextmanager
def alone() -> Iterator[None]:
    """torch warns of a single process even when told of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


class Run:
    """Model, optimizer, schedule and scaler of a case."""

    def __init__(self, case: str) -> None:
        policy, storage = case.split(", ")
        grid, rule = POLICIES[policy]
        self.model = Tied().to(torch.bfloat16 if storage == "native" else torch.float32)
        rule = hu.TileMaster(masks(self.model)) if rule == "some tiles" else rule
        self.opt = hu.WriteBack(adamw(self.model), grid, rule, model=self.model, seed=11, storage=storage)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda step: 1 / (1 + 0.1 * step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)

    def step(self, number: int) -> str:
        """One step; the digest of everything after it. Events are those of a step that was made: a run that
        was resumed right before one that the scaler skips has none yet, and checkpoints do not hold them."""
        before = self.opt.steps
        self.opt.zero_grad()
        loss = loss_of(self.model, number) * (torch.inf if number == OVERFLOW else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.schedule.step()
        return self.digest(loss, self.opt.events if self.opt.steps > before else None)

    def digest(self, loss: torch.Tensor, events: Any) -> str:
        """Weights, moments, what the policy keeps, rates, events, scale and loss."""
        state = self.opt.state_dict()
        tensors = {
            **self.model.state_dict(),
            **{f"{k}/{n}": v for k, e in state["state"].items() for n, v in e.items()},
        }
        groups = [{k: v for k, v in sorted(g.items()) if k != "initial_lr"} for g in state["param_groups"]]
        rest = repr(
            (
                groups,
                events,
                self.scaler.state_dict(),
                self.schedule.state_dict()["last_epoch"],
                loss.item(),
            )
        )
        made = hashlib.sha256(rest.encode())
        for name in sorted(tensors):
            made.update(
                name.encode()
                + tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        return made.hexdigest()

    def save(self, folder: Path, kind: str) -> None:
        folder.mkdir(parents=True)
        rest = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}
        if kind == "torch":
            rest |= {"model": self.model.state_dict(), "opt": self.opt.state_dict()}
        elif kind == "safetensors":
            rest |= {"model": self.model.state_dict()}
            save(self.opt, folder / "state.safetensors")
        else:
            model, opt = get_state_dict(self.model, self.opt)
            with alone():
                dcp.save({"model": model, "opt": opt}, checkpoint_id=folder / "sharded", no_dist=True)
        torch.save(rest, folder / "rest.pt")

    def load(self, folder: Path, kind: str) -> None:
        rest = torch.load(folder / "rest.pt", weights_only=True)
        if kind == "distributed":
            model, opt = get_state_dict(self.model, self.opt)
            with alone():
                dcp.load({"model": model, "opt": opt}, checkpoint_id=folder / "sharded", no_dist=True)
            set_state_dict(self.model, self.opt, model_state_dict=model, optim_state_dict=opt)
        else:
            if self.opt.storage != "packed":
                self.model.load_state_dict(rest["model"])
            if kind == "torch":
                self.opt.load_state_dict(rest["opt"])
            else:
                load(self.opt, folder / "state.safetensors")
            if (
                self.opt.storage == "packed"
            ):  # the codes are in the optimizer's state; values alone may not give steps
                self.model.load_state_dict(rest["model"])
        self.schedule.load_state_dict(rest["schedule"])
        self.scaler.load_state_dict(rest["scaler"])


def resume_all(folder: Path) -> dict[str, list[str]]:
    """Every checkpoint of a folder, trained to the end."""
    log = {}
    for checkpoint in sorted(folder.glob("*/*/*")):
        case, stop, kind = checkpoint.parts[-3:]
        run = Run(case)
        run.load(checkpoint, kind)
        log[f"{case}/{stop}/{kind}"] = [run.step(number) for number in range(int(stop), STEPS)]
    return log


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = resume_all(Path(sys.argv[1]))
    Path(sys.argv[1], "log.json").write_text(json.dumps(found))
