"""One training loop for every decoder study.

An update draws ``batch`` sequences, goes through them in micro-batches, clips the gradient and steps
the optimizer at the schedule's rate. The optimizer is the caller's: a plain one, or a
:class:`halfulp.WriteBack` around it; an audit hooks it from outside. The loop knows of neither.

    model = Decoder(CHARACTER, seed=1)
    optimizer = hu.WriteBack(adamw(model, recipe), "e4m3@128", "sr", model=model, seed=2)
    training = Training(model, optimizer, tokens, recipe)
    with hu.Audit(optimizer, "e4m3@128", model=model, out="runs/arm"):
        while not training.done:
            training.step()

**Arms are matched by construction.** Which sequences update u sees is a function of (recipe's seed, u)
and of nothing that happened before, so runs that share a recipe see the same data whatever their policy,
micro-batch or number of interruptions; models of one seed start from the same weights, hence, rounded to
the nearest, from the same codes. (A generator that is reset for every arm does the same only as
long as no arm draws a number more than another.)

**A run goes on where it stopped, to the bit.** The state is the weights, the optimizer's state and the
number of updates; :meth:`Training.save` gives it as bytes, one safetensors file.

**Tokens** are a one-dimensional array of unsigned 16-bit integers, in memory or mapped from a file in
nanoGPT's layout (:func:`halfulp.paper.tokens.open_bin`). A sequence begins anywhere, with equal chance.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from halfulp import kernels
from halfulp.errors import CorruptionError, HalfulpError, UsageError, VersionError
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream
from halfulp.paper.models.decoder import Decoder
from halfulp.text import shown
from halfulp.writeback.storage.native_weight import flat_state, native_state

Tokens = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]

VERSION = 1
CURSOR = "cursor"
SAVED = ("params", "lr", "halfulp")
"""The saved entries of a parameter group; the recipe has the others. The last is a write-back's identity."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of every update, counted from 1: a linear warmup, then cosines to the floor.

    ``cycles`` cosines share the updates after the warmup; a floor as high as the peak is a constant
    rate. ``zero_based`` is the indexing of nanoGPT and of the paper's runs: they count updates from
    zero and warm up over one more than ``warmup``, so that the peak is reached one update late and the
    floor not quite. Without it the peak is at update ``warmup`` and the floor at ``horizon``.

    >>> cosine = Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000)
    >>> f"{cosine.rate(100):.6e} {cosine.rate(101):g} {cosine.rate(3000) - 6e-5:.4e}"
    '5.940594e-04 0.0006 1.5843e-10'
    """

    peak: float
    floor: float
    warmup: int
    horizon: int
    cycles: int = 1
    zero_based: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.horizon or self.cycles < 1 or not 0 <= self.floor <= self.peak:
            raise UsageError(f"a schedule needs warmup < horizon, floor <= peak and a cycle: {self}.")

    def rate(self, update: int) -> float:
        """Return the learning rate of an update."""
        at = update - 1 if self.zero_based else update
        if at < self.warmup:
            return self.peak * update / (self.warmup + 1 if self.zero_based else self.warmup)
        if at >= self.horizon:
            return self.floor
        through = (at - self.warmup) / (self.horizon - self.warmup) * self.cycles % 1.0
        return self.floor + 0.5 * (1.0 + math.cos(math.pi * through)) * (self.peak - self.floor)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a run but its model, its data and its write-back. Defaults are the paper's."""

    schedule: Schedule
    updates: int
    seed: int = 0
    """The seed of the data order."""
    batch: int = 12
    context: int = 1024
    micro: int | None = None
    """Sequences at a time; all of a batch by default. Changes memory, and the order of a float sum."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    half: bool = False
    """True to compute products in float16 (on a CPU, in bfloat16) with autocast."""
    loss_scale: float | None = None
    """The factor on the loss in the backward pass; when a gradient is not finite, it is halved and the same
    batch is tried again."""
    checkpointing: bool = False
    """True to recompute a block's activations in the backward pass instead of keeping them."""
    eval_every: int = 250
    eval_batches: int = 8
    eval_contexts: int | None = None
    """Held-out sequences of an evaluation, where they are not a whole number of batches."""
    eval_seed: int = 4242

    def __post_init__(self) -> None:
        micro = self.batch if self.micro is None else self.micro
        if min(self.updates, self.batch, self.context, micro, self.eval_every, self.eval_batches) < 1:
            raise UsageError(f"updates, batches and context are at least 1: {self}.")

    @property
    def held_contexts(self) -> int:
        """Held-out sequences of an evaluation."""
        return self.eval_contexts or self.eval_batches * self.batch

    def evaluates(self, update: int) -> bool:
        """Return True if the held-out loss is taken after an update: 1, 1 + every, ... and the last."""
        return (update - 1) % self.eval_every == 0 or update == self.updates

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as a study's config holds it."""
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Recipe:
        """Build a recipe from a study's config."""
        return cls(**{**config, "schedule": Schedule(**config["schedule"]), "betas": tuple(config["betas"])})


def adamw(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW with weight decay on every tensor of two or more dimensions, as in nanoGPT."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    rate = recipe.schedule.rate(1)
    return torch.optim.AdamW(groups, lr=rate, betas=recipe.betas, eps=recipe.epsilon, fused=True)


@torch.no_grad()
def project(model: torch.nn.Module, grid: str | Grid) -> None:
    """Round every tensor of two or more dimensions to a grid: the start of a projected-start anchor."""
    for p in model.parameters():
        if p.dim() >= 2:
            p.copy_(kernels.round(p, grid))


# ---- data -------------------------------------------------------------------------------------------


def starts(seed: int, purpose: str, step: int, count: int, choices: int) -> Positions:
    """Draw where the sequences of a step begin: ``count`` of ``choices`` positions, with replacement.

    64 random bits modulo the choices: no position is likelier than another by more than one part in
    2**64 / choices.

    >>> starts(1337, "training", 1, 3, 1000).tolist() == starts(1337, "training", 1, 9, 1000)[:3].tolist()
    True
    """
    if choices < 1:
        raise UsageError("the corpus is not longer than the context: there is no sequence to draw.")
    words = Stream(seed=seed, name=purpose, step=step).words(2 * count).astype(np.uint64)
    drawn = (words[::2] << np.uint64(32)) | words[1::2]
    return (drawn % np.uint64(choices)).astype(np.int64)


def sequences(
    tokens: Tokens, begin: Positions, context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, (len(begin), context) each; a target is the token that follows."""
    rows = np.stack([tokens[i : i + context + 1] for i in begin.tolist()]).astype(np.int64)
    both = torch.from_numpy(rows).to(device)
    return both[:, :-1], both[:, 1:]


# ---- the loop ---------------------------------------------------------------------------------------


class Training:
    """A run: a model, an optimizer, tokens and a recipe; ``update`` says how far it is."""

    def __init__(
        self,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        tokens: Tokens,
        recipe: Recipe,
        *,
        held_out: Tokens | None = None,
    ) -> None:
        if recipe.context > model.config.context:
            raise UsageError(
                f"the recipe's context of {recipe.context} is more than the model's {model.config.context}."
            )
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.tokens, self.held_out = tokens, held_out
        self.device = next(model.parameters()).device
        self.update = 0
        self.norm: torch.Tensor | float = math.nan
        """Of the last update's gradient, before it was clipped."""
        self.scale = recipe.loss_scale
        self.backoffs: list[tuple[int, float, float]] = []
        """Updates that were tried again, the scale that failed and the next."""
        model.transformer.checkpointing = recipe.checkpointing

    @property
    def done(self) -> bool:
        """Return True when every update has been made."""
        return self.update >= self.recipe.updates

    def step(self) -> torch.Tensor:
        """Make one update and return its training loss, still on the device."""
        recipe, update = self.recipe, self.update + 1
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.schedule.rate(update)
        begin = self._starts(self.tokens, recipe.seed, "training", update)
        total, norm = self._gradients(begin)
        while self.scale is not None and not bool(torch.isfinite(norm)):
            if self.scale < 1.0:
                raise UsageError(f"update {update} overflows at a loss scale of {self.scale:g}: it diverged.")
            self.backoffs.append((update, self.scale, self.scale / 2))
            self.scale /= 2
            total, norm = self._gradients(begin)
        self.optimizer.step()
        self.update, self.norm = update, norm
        return total

    def _gradients(self, begin: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of these sequences, and the norm of its gradient, which is clipped."""
        recipe, total = self.recipe, torch.zeros((), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for part in self._micro(begin):
            x, y = sequences(self.tokens, part, recipe.context, self.device)
            with self._precision():
                loss = self.model.loss(x, y) * (len(part) / recipe.batch)
            (loss if self.scale is None else loss * self.scale).backward()  # type: ignore[no-untyped-call]  # torch's
            total += loss.detach()
        if self.scale is not None:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(1.0 / self.scale)
        return total, torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if not self.recipe.half:
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.device.type == "cpu" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def evaluate(self) -> float:
        """The mean loss over the fixed held-out contexts, the same for every run of a recipe's sizes."""
        return self.evaluate_contexts()[0]

    @torch.no_grad()
    def evaluate_contexts(self) -> tuple[float, npt.NDArray[np.float32]]:
        """Return the mean held-out loss, and that of every context by itself, in a fixed order."""
        if self.held_out is None:
            raise UsageError("there is no held-out text to evaluate on: pass held_out=.")
        recipe, total, apart = self.recipe, 0.0, []
        contexts = recipe.held_contexts
        for i in range(-(-contexts // recipe.batch)):
            begin = self._starts(self.held_out, recipe.eval_seed, "evaluation", i)
            for part in self._micro(begin[: contexts - i * recipe.batch]):
                x, y = sequences(self.held_out, part, recipe.context, self.device)
                with self._precision():
                    logits = self.model(x).float()
                total += float(F.cross_entropy(logits.flatten(0, 1), y.flatten())) * len(part)
                apart.append(F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(dim=1).cpu())
        return total / contexts, torch.cat(apart).numpy()

    def _starts(self, tokens: Tokens, seed: int, purpose: str, step: int) -> Positions:
        return starts(seed, purpose, step, self.recipe.batch, len(tokens) - self.recipe.context)

    def _micro(self, begin: Positions) -> list[Positions]:
        size = self.recipe.micro or len(begin)
        return [begin[i : i + size] for i in range(0, len(begin), size)]

    # ---- stopping and going on ----

    def save(self, notes: Any = None, kept: Mapping[str, torch.Tensor] | None = None) -> bytes:
        """Return the whole state, as the bytes of a safetensors file.

        ``notes`` are JSON of the caller's, ``kept`` tensors: those of an audit, for example.
        """
        state = self.optimizer.state_dict()
        groups = [{k: g[k] for k in SAVED if k in g} for g in state["param_groups"]]
        cursor = {
            "version": VERSION,
            "update": self.update,
            "recipe": self.recipe.to_json(),
            "groups": groups,
            "notes": notes,
        }
        if self.scale is not None:
            cursor |= {"scale": self.scale, "backoffs": self.backoffs}
        tensors = {f"model/{name}": t for name, t in flat_state(self.model.state_dict()).items()}
        for number, kept_state in state["state"].items():
            tensors.update({f"optimizer/{number}/{name}": t for name, t in kept_state.items()})
        tensors.update({f"kept/{name}": t for name, t in (kept or {}).items()})
        tensors[CURSOR] = torch.frombuffer(bytearray(json.dumps(cursor).encode()), dtype=torch.uint8)
        return bytes(save_tensors({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))

    def load(self, saved: bytes) -> tuple[Any, dict[str, torch.Tensor]]:
        """Take up a saved state; gives back the caller's notes and tensors.

        Model and optimizer must be made as they were.
        """
        try:
            # Copies, so that nothing keeps the file's bytes, or their odd alignment, alive.
            tensors = {name: t.clone() for name, t in load_tensors(saved).items()}
            cursor = json.loads(bytes(tensors.pop(CURSOR).numpy()))
            version, notes = cursor["version"], cursor["notes"]
            recipe = {"eval_contexts": None, **cursor["recipe"]}  # states of before there was this choice
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptionError(f"this is not the state of a training run: {error!r}.") from None
        if version != VERSION:
            raise VersionError(f"this training state has version {version}; this halfulp reads {VERSION}.")
        if recipe != self.recipe.to_json():
            mine = self.recipe.to_json()
            other = ", ".join(f"{k} {recipe.get(k)!r}" for k in mine if recipe.get(k) != mine[k])
            raise UsageError(f"this training state is of another recipe: it has {other}.")
        try:
            self._take(tensors, cursor)
        except HalfulpError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptionError(
                f"this training state does not fit the model and optimizer: {shown(str(error), 300)}."
            ) from None
        return notes, {k.removeprefix("kept/"): t for k, t in tensors.items() if k.startswith("kept/")}

    def _take(self, tensors: Mapping[str, torch.Tensor], cursor: Mapping[str, Any]) -> None:
        mine = self.optimizer.state_dict()["param_groups"]
        if any("halfulp" in g for g in mine) != any("halfulp" in g for g in cursor["groups"]):
            raise UsageError("this training state is of another arm: only one of the two has a write-back.")
        weights = {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}
        self.model.load_state_dict(native_state(weights))
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimizer/"):
                _, number, name = key.split("/", 2)
                state.setdefault(int(number), {})[name] = value
        fresh = [{k: v for k, v in group.items() if k not in SAVED} for group in mine]
        groups = [{**own, **theirs} for own, theirs in zip(fresh, cursor["groups"], strict=True)]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.update = cursor["update"]
        self.scale = cursor.get("scale")
        self.backoffs = [tuple(entry) for entry in cursor.get("backoffs", [])]
