"""Arms of decoder studies as data, bundles of them, and what is measured of their records."""

from halfulp.arms.arm import Arm
from halfulp.arms.bundle import Anchors, Bundle, Masked
from halfulp.arms.standard import standard
from halfulp.arms.tables import tables

__all__ = ["Anchors", "Arm", "Bundle", "Masked", "standard", "tables"]
