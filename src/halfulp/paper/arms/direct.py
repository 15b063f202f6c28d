"""A direct-state run: few values per weight, no master; its checkpoints are files, which other cells replay.

DQT's rule (:class:`halfulp.writeback.DQT`): every tensor holds integers of three bits over one scale. A
checkpoint is, for every tensor, its distinct values, eight at most, and three bits per weight; more values
are refused. Of every update a record keeps loss, gradient norm and loss scale, so
that a run which was continued is seen to repeat what it had done.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from halfulp.errors import CorruptionError
from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.run import attention, device, digest
from halfulp.paper.models.decoder import Decoder
from halfulp.paper.models.training import Training, adamw
from halfulp.paper.tokens import open_corpus
from halfulp.study import Running
from halfulp.writeback import WriteBack, WriteBackOptions
from halfulp.writeback.storage.packed import pack_bits, unpack_bits

BITS = 3


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the values and packed codes of every tensor."""
    state: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        values, codes = torch.unique(p.detach().cpu(), return_inverse=True)
        if len(values) > 2**BITS:
            raise CorruptionError(f"{name} holds {len(values)} distinct values, more than {BITS} bits name.")
        state |= {f"{name}/values": values, f"{name}/codes": pack_bits(codes, BITS)}
    return state


@torch.no_grad()
def put_state(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load the weights from a saved state."""
    for name, p in model.named_parameters():
        codes = unpack_bits(state[f"{name}/codes"], BITS, p.numel())
        p.copy_(state[f"{name}/values"][codes.long()].reshape(p.shape))


def file_of(update: int) -> str:
    """Return the name of a checkpoint beside the record."""
    return f"update-{update}.safetensors"


def train(running: Running) -> dict[str, Any]:
    """Train and return the record; checkpoints precede the first update and follow every ``eval_every``."""
    arm = Arm.from_json(running.config)
    tokens, held_out = open_corpus(running.data, arm.corpus, arm.model.vocabulary)
    model = Decoder(arm.model, seed=arm.seed, device=device(arm.device))
    optimizer = WriteBack(
        adamw(model, arm.recipe), arm.grid or "", arm.policy or "", model=model, seed=arm.stream_seed,
        params=lambda _name, _p: True, options=WriteBackOptions(telemetry=False),
    )  # fmt: skip
    training = Training(model, optimizer, tokens, arm.recipe, held_out=held_out)
    record: dict[str, Any] = {
        "seed": arm.seed, "updates": arm.recipe.updates,
        "parameters": sum(p.numel() for p in model.parameters()),
        "start": digest(model), "losses": {}, "evidence": [],
    }  # fmt: skip
    kept: dict[str, torch.Tensor] = {}
    saved = running.load()
    if saved is not None:
        record, kept = training.load(saved)
    with attention(arm.attention):
        if saved is None:
            _keep(training, record, kept)
        while not training.done:
            loss = training.step()
            record["evidence"].append([float(loss), float(training.norm), training.scale])
            if training.update % arm.recipe.eval_every == 0:
                _keep(training, record, kept)
            if training.update % arm.save_every == 0:
                running.save(training.save(record, kept))
            running.progress(training.update, arm.recipe.updates)
    for update in record["losses"]:
        mine = {k.partition(":")[2]: t for k, t in kept.items() if k.startswith(f"{update}:")}
        running.attach(file_of(int(update)), save_tensors(mine))
    return {**record, "backoffs": [list(entry) for entry in training.backoffs], "end": digest(model)}


def _keep(training: Training, record: dict[str, Any], kept: dict[str, torch.Tensor]) -> None:
    """Note the held-out loss of now, and the state for a file."""
    record["losses"][str(training.update)] = training.evaluate()
    kept |= {f"{training.update}:{name}": t for name, t in state_of(training.model).items()}


def replay(running: Running) -> dict[str, Any]:
    """Return the held-out loss of a checkpoint's file, in a model that was made for it."""
    update, cell = running.config["update"], running.config["cell"]
    arm = Arm.from_json(running.config["arm"])
    tokens, held_out = open_corpus(running.data, arm.corpus, arm.model.vocabulary)
    model = Decoder(arm.model, seed=arm.seed + 1, device=device(arm.device))
    put_state(model, load_tensors(running.read_bytes("train", cell, file_of(update))))
    training = Training(model, adamw(model, arm.recipe), tokens, arm.recipe, held_out=held_out)
    with attention(arm.attention):
        loss = training.evaluate()
    most = max(len(torch.unique(p.detach())) for p in model.parameters())
    held = arm.recipe.held_contexts * arm.recipe.context
    return {"update": update, "loss": loss, "tokens": held, "values": most}
