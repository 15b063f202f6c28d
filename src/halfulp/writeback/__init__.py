"""Write back to stored weights: the rules that turn an optimizer's proposal into the next stored value."""

from halfulp.writeback.average import average_, ema
from halfulp.writeback.choosing import WriteBackOptions
from halfulp.writeback.fused.optimizers import SGD, Adam, AdamW, Lion
from halfulp.writeback.narrow_states import bf16_moments
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.policies import (
    DQT,
    ECO,
    POLICIES,
    DeadzoneStochastic,
    Kahan,
    Master,
    Nearest,
    Policy,
    Stochastic,
    TileMaster,
    policy,
)  # fmt: skip
from halfulp.writeback.saving.flattened import unflattened
from halfulp.writeback.saving.one_file import load, save
from halfulp.writeback.storage.dispatch import Dispatch
from halfulp.writeback.storage.native_weight import NativeWeight, native
from halfulp.writeback.telemetry import Bytes, Events

__all__ = [
    "DQT",
    "ECO",
    "POLICIES",
    "SGD",
    "Adam",
    "AdamW",
    "Bytes",
    "DeadzoneStochastic",
    "Dispatch",
    "Events",
    "Kahan",
    "Lion",
    "Master",
    "NativeWeight",
    "Nearest",
    "Policy",
    "Stochastic",
    "TileMaster",
    "WriteBack",
    "WriteBackOptions",
    "average_",
    "bf16_moments",
    "ema",
    "load",
    "native",
    "policy",
    "save",
    "unflattened",
]  # fmt: skip
