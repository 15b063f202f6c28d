"""Arms of decoder studies as data, bundles of them, and what is measured of their records."""

from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.bundle import Anchors, Bundle, Masked
from halfulp.paper.arms.standard import standard, tables

__all__ = ["Anchors", "Arm", "Bundle", "Masked", "standard", "tables"]
