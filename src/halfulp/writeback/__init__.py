"""Write-back: what happens between an optimizer's proposal and the stored weight."""

from halfulp.writeback.adamw import Adam, AdamW
from halfulp.writeback.checkpoint import load, save
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
    "DQT", "ECO", "POLICIES", "Adam", "AdamW", "Bytes", "DeadzoneStochastic", "Events", "Kahan",
    "Master", "Nearest", "Policy", "Stochastic", "TileMaster", "WriteBack", "load", "policy", "save",
]  # fmt: skip
