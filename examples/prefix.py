"""Two objectives, one past: why no finite trace tells what the next update does.

Three high-precision runs and one run on e4m3 are recorded. Then two smooth objectives are built that give
every recorded number again, bit for bit, and do opposite things next. Run it:

    python examples/prefix.py
"""

from __future__ import annotations

import numpy as np

from halfulp.paper.certificates import Descent, Objective, Prefix, reachable_prefix

CENTRE = np.array([0.3, -1.7])


def value(x: np.ndarray) -> float:
    """Smooth and coercive: a bowl around CENTRE with a ripple."""
    return float(np.sum(np.log(np.cosh(x - CENTRE))) + 0.1 * np.cos(x[0] + x[1]))


def gradient(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.tanh(x - CENTRE) - 0.1 * np.sin(x[0] + x[1]))


def build() -> Prefix:
    """Sources in float64 from three starts; a target on e4m3 that has made four updates."""
    sources = [Descent(start, [0.2] * 200) for start in ([2.0, 2.0], [-3.0, 0.5], [1.0, -2.5])]
    target = Descent([2.0, 2.0], [0.2] * 5, grid="e4m3")
    return reachable_prefix(Objective(value, gradient), sources, target, coordinate=0)


def main() -> None:
    p = build()
    i = p.coordinate
    print("A run on e4m3 by gradient descent, rate 0.2:")
    for t, q in enumerate(p.target):
        print(f"  q_{t} = ({q[0]:8.5f}, {q[1]:8.5f})")
    seen = sum(len(states) for states in p.sources) + len(p.target) - 1
    print(f"\n{seen} states have been recorded, none within {2 * p.radius:.3g} of the last one.")
    print("Two smooth objectives give all of them again, bit for bit, values and gradients included.")
    print(f"\nThe next update of coordinate {i}:")
    print(f"  under the first   {p.q[i]} -> {p.next_stay[i]}   frozen")
    print(f"  under the second  {p.q[i]} -> {p.next_cross[i]}   moved")
    direction = np.array([1.0, 0.0])
    print("\nThey differ here only, along coordinate 0 from q (first minus second):")
    for part in (0.0, 0.25, 0.5, 0.75, 1.0, 2.0):
        x = p.q + part * p.radius * direction
        print(f"  at {part:4.2f} radius   {p.stay.value(x) - p.cross.value(x):+.6f}")
    print("\nA trace says what was asked of the objective. Only a bound on its derivatives says more.")


if __name__ == "__main__":
    main()
