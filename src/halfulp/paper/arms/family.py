"""The decoders and texts of the decoder studies, by scale: one family for all of them.

``paper``: the paper's own models on OpenWebText. ``small``: decoders of the same three kinds, four layers of
width 128, on prose in 4096 pieces; a run takes a minute or two on one core. ``medium``: the same decoders for
longer, where small is too short to show what the paper shows. A narrow model starts from larger
weights (0.02 times the root of 768 / 128) and learns at three times the paper's rate, so that gaps, partial
recovery and freezing look like the paper's; what it shows beside the paper, and what else was tried, is in
docs/decoder.md. ``smoke``: that a study runs.

A tile is a row of a width-sized matrix at every scale, as it is in the paper: one token of an embedding.
Sizes are such that a tenth of the tiles is a whole number of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halfulp.paper.arms.arm import BYTES, PLAYS, PROSE, WEB, Arm
from halfulp.paper.models.decoder import GPT2, MODERN, NEOX, DecoderConfig
from halfulp.paper.models.training import Recipe, Schedule

PAPER_RATES = (6e-4, 6e-5)
SMALL_RATES = (1.8e-3, 1.8e-4)
"""Peak and floor of the learning rate."""


def at(shared: Arm, *, updates: int, warmup: int, eval_every: int, horizon: int | None = None) -> Arm:
    """Return a run of some updates, with a warmup and a cosine to the horizon: the last update by default."""
    schedule = replace(shared.recipe.schedule, warmup=warmup, horizon=horizon or updates)
    return replace(
        shared, recipe=replace(shared.recipe, schedule=schedule, updates=updates, eval_every=eval_every)
    )


def three_thousand(smoke: Arm, small: Arm, paper: Arm) -> dict[str, Arm]:
    """Return the scales of the studies of 3000 updates: a warmup of a thirtieth, a cosine to the end."""
    return {
        "smoke": replace(at(smoke, updates=8, warmup=2, eval_every=4), save_every=3),
        "small": at(small, updates=120, warmup=4, eval_every=20),
        "medium": at(small, updates=600, warmup=20, eval_every=100),
        "paper": at(paper, updates=3000, warmup=100, eval_every=250),
    }


def native_three_thousand(smoke: Arm, small: Arm, paper: Arm, *, tables: bool = True) -> dict[str, Arm]:
    """Return these scales for native runs, which replay start and end; the small one has more updates."""
    arms = three_thousand(smoke, small, paper)
    arms["small"] = at(small, updates=300, warmup=10, eval_every=50)
    return {name: replace(arm, replay=True, tables=tables) for name, arm in arms.items()}


def _arm(
    model: DecoderConfig,
    corpus: dict[str, str],
    rates: tuple[float, float],
    recipe: dict[str, Any],
    **how: Any,
) -> Arm:
    """Build the arm that the runs of a study share, except for its length (:func:`at`)."""
    schedule = Schedule(peak=rates[0], floor=rates[1], warmup=0, horizon=1)
    training = Recipe(schedule=schedule, updates=1, context=model.context, **recipe)
    return Arm(model=model, recipe=training, corpus=corpus, tile=model.width, **how)


def _smoke(kind: DecoderConfig, **sizes: Any) -> Arm:
    model = replace(kind, layers=2, heads=2, context=32, **sizes)
    return _arm(model, PLAYS, PAPER_RATES, {"batch": 4, "eval_batches": 2}, save_every=100)


def _small(kind: DecoderConfig, **sizes: Any) -> Arm:
    shape = {"layers": 4, "heads": 4, "width": 128, "context": 64, "vocabulary": 4096, "std": 0.049, **sizes}
    return _arm(replace(kind, **shape), PROSE, SMALL_RATES, {}, save_every=100)


def _paper(kind: DecoderConfig) -> Arm:
    return _arm(kind, WEB, PAPER_RATES, {"micro": 4}, device="auto", save_every=250)


def _native(kind: DecoderConfig) -> Arm:
    """Return a decoder whose float8 products a CPU can afford: it has no units for them."""
    model = replace(kind, layers=2, heads=4, width=64, context=64, vocabulary=80, hidden=256, std=0.07)
    return _arm(model, PLAYS, SMALL_RATES, {"eval_batches": 4}, save_every=100)


def narrow(small: Arm, hidden: int) -> Arm:
    """Return a smaller member of a small arm's family, on bytes, so that there is time for more runs."""
    model = replace(small.model, layers=2, width=64, hidden=hidden, context=64, vocabulary=256, std=0.0693)
    return replace(
        small, model=model, recipe=replace(small.recipe, context=64, eval_batches=16), corpus=BYTES
    )


SMOKE_GPT2 = _smoke(GPT2, width=32, vocabulary=65, hidden=128)
SMOKE_MODERN = _smoke(MODERN, width=48, vocabulary=96, hidden=64)
SMOKE_NEOX = _smoke(NEOX, width=32, vocabulary=65, hidden=128)
SMALL_GPT2 = _small(GPT2, hidden=512, context=60)
SMALL_MODERN = _small(MODERN, hidden=340)
SMALL_NEOX = _small(NEOX, hidden=512)
SMALL_NATIVE = _native(NEOX)
PAPER_GPT2, PAPER_MODERN, PAPER_NEOX = _paper(GPT2), _paper(MODERN), _paper(NEOX)
