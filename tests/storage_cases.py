"""Policies and grids that stored weights are tested with."""

from __future__ import annotations

from typing import Any

import torch
from writeback_models import masks

import halfulp as hu
from halfulp.writeback import Kahan, Master

POLICIES: dict[str, Any] = {
    "rne": "rne",
    "sr": "sr",
    "deadzone-sr": "deadzone-sr",
    "eco": "eco",
    "kahan": "kahan",
    "kahan in bfloat16": Kahan(torch.bfloat16),
    "master": "master",
    "master from raw": Master("raw"),
    "some tiles": "some tiles",
}
# one of every width: 2 to 8 bits, the odd ones above, 16; and scales of every kind
GRIDS = [
    "int2@4",
    "int3@8",
    "e2m1@4",
    "int5@16",
    "e2m3@16",
    "int7@64",
    "e4m3@16",
    "m0",
    "m1",
    "m2",
    "m3",
    "m4",
    "m5",
    "m6",
    "bf16",
    "fp16",
    "int8",
    "int4/absmean",
    "int8/row",
    "int4/g128",
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
]


def chosen(policy: str, model: torch.nn.Module) -> Any:
    return hu.TileMaster(masks(model)) if policy == "some tiles" else POLICIES[policy]
