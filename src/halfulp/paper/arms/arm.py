"""One training run of a decoder study, as data.

An :class:`Arm` says everything about a run: model, recipe, text, seed, and what happens after every
optimizer step: nothing (float32), or a write-back to a grid under a policy. It is JSON and back, with what is
left at its default left out, so it is printed, sealed and replayed, and two arms differ where their JSON
does. A study declares one arm a scale and changes a field or two of it (:mod:`halfulp.paper.arms.bundle`).

>>> from halfulp.paper.models.decoder import CHARACTER
>>> schedule = Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000)
>>> shared = Arm(model=CHARACTER, recipe=Recipe(schedule=schedule, updates=3000), corpus=PLAYS)
>>> nearest = replace(shared, seed=1337, grid="e4m3@128", policy="rne")
>>> sorted(nearest.to_json())
['corpus', 'grid', 'model', 'policy', 'recipe', 'seed']
>>> Arm.from_json(nearest.to_json()) == nearest
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from halfulp.errors import UsageError
from halfulp.kernels import TILE
from halfulp.paper.models.decoder import DecoderConfig
from halfulp.paper.models.training import Recipe, Schedule
from halfulp.writeback import TileMaster
from halfulp.writeback.choosing import Storage
from halfulp.writeback.policies import parsed

Json = Any

PLAYS = {"kind": "characters", "train": "tinyshakespeare.txt"}
PROSE = {"kind": "bin", "train": "prose_bpe4096_train.bin", "held_out": "prose_bpe4096_val.bin"}
BYTES = {"kind": "bytes", "train": "se_prose_train.txt.gz", "held_out": "se_prose_val.txt.gz"}
WIKIPEDIA = {"kind": "bin", "train": "wikipedia/train.bin", "held_out": "wikipedia/val.bin"}
WEB = {"kind": "bin", "train": "openwebtext/train.bin", "held_out": "openwebtext/val.bin"}
"""Texts, as :func:`halfulp.paper.tokens.open_corpus` takes them."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A run: see the module's docstring."""

    model: DecoderConfig
    recipe: Recipe
    corpus: Mapping[str, str]
    seed: int = 0
    """The seed of the initial weights and of the order of the data."""
    grid: str | None = None
    policy: str | None = None
    """A policy as it prints itself: ``sr``, ``master(start_from=raw)``; with its grid, or neither."""
    projection: Literal["nearest", "stochastic"] = "nearest"
    """The rounding that makes the first codes of a write-back."""
    storage: Storage | None = None
    """``native``: float8 codes and native products, with evidence of them."""
    stream_seed: int = 0
    projected: str | None = None
    """The grid to which a float32 run is rounded once, before it starts."""
    audit: tuple[str, ...] = ()
    """Grids that a float32 run forecasts."""
    rehearse: tuple[str, ...] = ()
    """The rehearsals of a float32 run: grids, with policies as in ``e5m2:sr`` or ``e5m2:tiles(NAME)``."""
    masks: Mapping[str, str] | None = None
    """The stage and cell of the masks that are named in rehearsals, and held beside those that are made."""
    attribute: Mapping[str, Json] | None = None
    """The rehearsals (``of``) that a float32 run attributes to tiles, and the numbers of ``moments`` of the
    run, of ``points`` of the path and of ``batches`` of training text."""
    scores: tuple[str, int] | None = None
    """A grid, and the last update over which a float32 run sums allocation scores."""
    tile: int = TILE
    """Coordinates of a tile, for scores and masters."""
    make: Mapping[str, Json] | None = None
    """Masks that a scoring run makes of its sums when it ends, by name
    (:mod:`halfulp.paper.arms.mask_recipes`); the sums are then not attached."""
    mask: Mapping[str, str] | None = None
    """The stage, cell and name of the tiles that ``tile-master`` protects; ``evidence``: of another study."""
    device: str = "cpu"
    """cpu, or auto for a GPU where there is one."""
    attention: Literal["fastest", "math"] = "fastest"
    """``math``: plain matrix products, no fused kernel; the same sums in another order."""
    replay: bool = False
    """True to evaluate start and end again, from their saved states."""
    save_every: int = 200
    tables: bool = True
    """True to attach what the audit counted; the record has what measures need in any case."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", replace(self.recipe, seed=self.seed))
        if (self.grid is None) != (self.policy is None):
            raise UsageError("a write-back needs both a grid and a policy.")
        kind = None if self.policy is None else parsed(self.policy)[0]
        if (self.mask is not None) != (kind is TileMaster):
            raise UsageError("a mask is for the policy tile-master, which needs one.")

    @property
    def watched(self) -> tuple[str, ...]:
        """The grids whose events are recorded: those that are forecast, or the one that is written to."""
        return self.audit if self.grid is None else (self.grid,)

    def to_json(self) -> dict[str, Json]:
        """Return the fields that differ from the defaults; the recipe's seed is the arm's."""
        return {**compact(self), "recipe": compact(replace(self.recipe, seed=Recipe.seed))}

    @classmethod
    def from_json(cls, config: Mapping[str, Json]) -> Arm:
        """Build an arm from :meth:`to_json`; fields that are left out take their defaults."""
        values = dict(config)
        values["model"] = DecoderConfig(**values["model"])
        recipe = {"betas": Recipe.betas, **values["recipe"]}
        recipe.update(schedule=Schedule(**recipe["schedule"]), betas=tuple(recipe["betas"]))
        values["recipe"] = Recipe(**recipe)
        for name in ("audit", "rehearse", "scores"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)


def compact(value: Any) -> dict[str, Json]:
    """Return a dataclass as JSON, without fields that are at their defaults, at every level."""
    document = {}
    for f in fields(value):
        field_value = getattr(value, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if field_value == default:
            continue
        inner = compact(field_value) if is_dataclass(field_value) else field_value
        document[f.name] = (
            list(inner) if isinstance(inner, tuple) else dict(inner) if isinstance(inner, Mapping) else inner
        )
    return document
