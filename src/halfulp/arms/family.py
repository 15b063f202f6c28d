"""The decoders and texts of the decoder studies, by scale: one family for all of them.

``paper``: the paper's own models on OpenWebText. ``small``: three decoders of the same three kinds on prose
in 4096 pieces, small enough that a run takes a minute or two on one core; what they show beside the paper's,
and what else was tried, is in docs/decoder.md. ``smoke``: that a study runs.

A tile is a row of a width-sized matrix at every scale, as it is in the paper: one token of an embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halfulp.arms.arm import PLAYS, PROSE, WEB, Arm
from halfulp.models.decoder import GPT2, MODERN, NEOX, Config
from halfulp.models.training import Recipe, Schedule

PEAK, FLOOR = 6e-4, 6e-5


def _arm(
    model: Config,
    corpus: dict[str, str],
    *,
    peak: float = PEAK,
    floor: float = FLOOR,
    device: str = "cpu",
    save_every: int = 100,
    **recipe: Any,
) -> Arm:
    """What the runs of a study share, but for its length."""
    schedule = Schedule(peak=peak, floor=floor, warmup=0, horizon=1)
    made = Recipe(schedule=schedule, updates=1, context=model.context, **recipe)
    return Arm(
        model=model, recipe=made, corpus=corpus, tile=model.width, device=device, save_every=save_every
    )


def at(shared: Arm, *, updates: int, warmup: int, eval_every: int, horizon: int | None = None) -> Arm:
    """A run of some updates, with a warmup and a cosine to the horizon: the last update by default."""
    schedule = replace(shared.recipe.schedule, warmup=warmup, horizon=horizon or updates)
    return replace(
        shared, recipe=replace(shared.recipe, schedule=schedule, updates=updates, eval_every=eval_every)
    )


def _smoke(kind: Config, **sizes: Any) -> Arm:
    made = replace(kind, layers=2, heads=2, context=32, **sizes)
    return _arm(made, PLAYS, batch=4, eval_batches=2)


def _small(kind: Config, **sizes: Any) -> Arm:
    made = replace(kind, layers=3, heads=3, width=96, context=64, vocabulary=4096, **sizes)
    return _arm(made, PROSE)


def _paper(kind: Config) -> Arm:
    return _arm(kind, WEB, micro=4, device="auto", save_every=250)


SMOKE_GPT2 = _smoke(GPT2, width=32, vocabulary=65, hidden=128)
SMOKE_MODERN = _smoke(MODERN, width=48, vocabulary=96, hidden=64)
SMOKE_NEOX = _smoke(NEOX, width=32, vocabulary=65, hidden=128)
SMALL_GPT2, SMALL_MODERN, SMALL_NEOX = (
    _small(GPT2, hidden=384),
    _small(MODERN, hidden=256),
    _small(NEOX, hidden=384),
)
PAPER_GPT2, PAPER_MODERN, PAPER_NEOX = _paper(GPT2), _paper(MODERN), _paper(NEOX)
