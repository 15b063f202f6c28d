"""Register what the paper adds to the command line: its studies by name, and ``halfulp paper``.

The module of a study is imported only when that study is asked for, so listing it here costs nothing. The
command costs nothing either where there is no command line, as in the workers of a study.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from halfulp.paper.effort import Effort

PEAK_5090 = 104.8
"""Float32 TFLOPS of an RTX 5090, as the vendor's data sheet has it; the others' are from theirs."""

STUDIES = {
    name: f"halfulp.paper.studies.{name.replace('-', '_')}"
    for name in (
        "char-gpt", "matched-10k", "prospective-modern", "margin", "midpoint", "theory", "cnn",
        "emulator", "finite-size", "phase-diagram", "phase-edge", "two-layer", "testbed",
        "ce-transfer", "policy-3k", "nearest-10k", "modern-transfer", "neox-transfer",
        "source-amortized", "template-challenge", "native-schedule-shift", "native-coupled-sr", "dqt-int3",
        "whole-tensor", "tile-screen", "leverage-primary", "saliency-challenge", "mask-reuse",
        "eco-comparator", "depth-17", "gpt2-pareto", "packed-systems", "eco-systems", "gain-rate",
        "pilot-forecast",
    )
}  # fmt: skip
"""By name, the module of each study."""
FORMER = {
    "halfulp.arms": "halfulp.paper.arms",
    "halfulp.models": "halfulp.paper.models",
    "halfulp.studies": "halfulp.paper.studies",
    "halfulp.arms.costs": "halfulp.paper.arms.repetitions",
    "halfulp.arms.figures": "halfulp.paper.arms.plots",
    "halfulp.arms.forecasts": "halfulp.paper.arms.predictions",
    "halfulp.arms.masks": "halfulp.paper.arms.mask_recipes",
    "halfulp.arms.native": "halfulp.paper.arms.native_measures",
    "halfulp.models.cnn": "halfulp.paper.models.convolutional",
    "halfulp.models.following": "halfulp.paper.models.learning_forecasts",
    "halfulp.audit.certificates": "halfulp.paper.certificates",
    "halfulp.audit.trust": "halfulp.paper.trust",
    "halfulp.data.tokens": "halfulp.paper.tokens",
    "halfulp.drawing.panels": "halfulp.paper.panels",
    "halfulp.measures.dominance": "halfulp.paper.dominance",
    "halfulp.measures.learning": "halfulp.paper.models.learning_forecasts",
    "halfulp.measures.values": "halfulp.paper.values",
}
"""Former names of modules, mapped to their current ones; a package comes before its modules."""


def effort(config: Mapping[str, Any]) -> Effort:
    """Return what a cell takes, for `halfulp study plan`."""
    from halfulp.paper.effort import effort as of

    return of(config)


def gpus() -> dict[str, tuple[float, str]]:
    """Return operations a second by GPU, and where the number comes from."""
    from halfulp.paper.arms.family import PAPER_GPT2, at
    from halfulp.paper.effort import RTX_5090
    from halfulp.paper.effort import effort as of

    thousand = of(at(PAPER_GPT2, updates=1000, warmup=100, eval_every=1000).to_json())
    measured, peaks = thousand.operations / RTX_5090, {
        "rtx4090": 82.6, "l40s": 91.6, "h100": 66.9, "a100": 19.5, "v100": 15.7, "t4": 8.1,
    }  # fmt: skip
    scaled = {
        name: (
            measured * peak / PEAK_5090,
            f"scaled from the RTX 5090 by float32 peaks, {peak:g} to {PEAK_5090:g} TFLOPS",
        )
        for name, peak in peaks.items()
    }
    said = f"the paper's RTX 5090: 1000 updates of GPT-2 124M in {RTX_5090:g} s (tab:gpt2-pareto)"
    return {"rtx5090": (measured, said), **scaled}


def register(app: typer.Typer) -> None:
    """Add the command."""
    from halfulp.paper.report.command import paper

    app.command()(paper)
