"""The table of the paper's 31 protocols: its label, and the label of every scale that was run here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from halfulp import canonical
from halfulp.study.protocol import SCALES, Json, Table

PAPER = {
    "emulator": "the emulator stands for bfloat16 and its onset is predicted",
    "two-layer": "onset is predicted over a wide range of times",
    "cnn": "onset is predicted in a convolutional network",
    "finite-size": "a crossover that does not sharpen",
    "phase-diagram": "windows shrink upward as bits fall, stochastic rounding restores them, references know",
    "midpoint": "not promoted",
    "ce-transfer": "stopped before any run on a grid: a reference made no progress; no outcome",
    "margin": "no support: coordinate, interval and path negative",
    "theory": "statements hold as executed",
    "char-gpt": "crossing and trajectory foretold",
    "policy-3k": "the whole policy wins back 90% in every cell",
    "nearest-10k": "frozen from the start everywhere, as foretold",
    "matched-10k": "90% recovered on e4m3@128 only",
    "modern-transfer": "policy_only_transfer",
    "neox-transfer": "policy_and_reference_audit_transfer",
    "source-amortized": "source_amortized_reference_audit_supported",
    "template-challenge": "B_Y < H_S < X_S in every target",
    "native-schedule-shift": "inconclusive_invalid_native_source_audit",
    "native-coupled-sr": "native_deadzone_mediates_full_sr_recovery",
    "dqt-int3": "dqt_direct_state_int3_convergence_supported",
    "whole-tensor": "selection is above anti-selection",
    "tile-screen": "informative negative",
    "leverage-primary": "both stages pass",
    "saliency-challenge": "negative",
    "mask-reuse": "positive",
    "prospective-modern": "the source's mask transfers",
    "eco-comparator": "post hoc: eco is above the source's mask",
    "depth-17": "GO",
    "gpt2-pareto": "retain_allocator_headline=false",
    "packed-systems": "measured",
    "eco-systems": "measured",
}
"""By study, the label that our rules give the paper's printed rows; tests hold most of them to it."""

COURSE = "recovered"
"""A folder of the paper's own course, with a record made by hand, in place of a scale."""
LOOKED_AT = (*SCALES[1:], COURSE)


def labels(studies: Path) -> Mapping[str, Mapping[str, tuple[str, bool]]]:
    """Return, by study and scale, the label that was given, and whether its seal names a commit."""
    by_study: dict[str, dict[str, tuple[str, bool]]] = {}
    for study in PAPER:
        for scale in LOOKED_AT:
            folder = studies / f"{study}-{scale}"
            if (folder / "result.json").exists():
                result: Json = canonical.loads((folder / "result.json").read_bytes(), folder)
                seal: Json = canonical.loads((folder / "seal.json").read_bytes(), folder)
                by_study.setdefault(study, {})[scale] = (result["label"], seal["git"]["package"] is not None)
    return by_study


def agrees(study: str, label: str) -> bool:
    """Return True if a label is the paper's; why it was not promoted stands before one that was not."""
    return label.rpartition(": ")[2] == PAPER[study] or label == PAPER[study]


def table(studies: Path) -> Table:
    """Tabulate the labels; a scale whose seal names no commit is marked."""
    rows, by_study, agreeing = [], labels(studies), 0
    for study, label in PAPER.items():
        ran = by_study.get(study, {})
        same = [scale for scale, (ours, _) in ran.items() if agrees(study, ours)]
        agreeing += bool(same)
        said = "; ".join(
            f"{scale}{'' if commit else '*'}: {'the same' if agrees(study, ours) else ours}"
            for scale, (ours, commit) in ran.items()
        )
        rows.append((study, label, said or "not run", "yes" if same else "no" if ran else "-"))
    return Table(
        columns=("study", "the paper", "here, by scale", "agrees"), rows=rows,
        caption=f"{agreeing} of {len(PAPER)} labels agree at one scale at least. A star marks a seal that "
        "names no commit.",
    )  # fmt: skip
