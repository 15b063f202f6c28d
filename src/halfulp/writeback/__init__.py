"""Write-back: what happens between an optimizer's proposal and the stored weight."""

from halfulp.writeback.adamw import SGD, Adam, AdamW, Lion
from halfulp.writeback.checkpoint import load, save
from halfulp.writeback.dispatch import Dispatch
from halfulp.writeback.native import NativeWeight, native
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
from halfulp.writeback.report import Bytes, Events

__all__ = [
    "DQT", "ECO", "POLICIES", "SGD", "Adam", "AdamW", "Bytes", "DeadzoneStochastic", "Dispatch", "Events",
    "Kahan", "Lion", "Master", "NativeWeight", "Nearest", "Policy", "Stochastic", "TileMaster", "WriteBack",
    "load", "native", "policy", "save",
]  # fmt: skip
