"""The studies that come with halfulp, one short module each.

A name maps to the module whose ``STUDY`` it is. Modules are imported when a study is asked for, so
that listing them costs nothing.
"""

from __future__ import annotations

REGISTRY: dict[str, str] = {
    "char-gpt": "halfulp.studies.char_gpt",
    "matched-10k": "halfulp.studies.matched_10k",
    "allocation": "halfulp.studies.allocation",
    "margin": "halfulp.studies.margin",
    "midpoint": "halfulp.studies.midpoint",
    "theory": "halfulp.studies.theory",
    "cnn": "halfulp.studies.cnn",
    "emulator": "halfulp.studies.emulator",
    "finite-size": "halfulp.studies.finite_size",
    "phase-diagram": "halfulp.studies.phase_diagram",
    "two-layer": "halfulp.studies.two_layer",
    "testbed": "halfulp.studies.testbed",
    "ce-transfer": "halfulp.studies.ce_transfer",
}
