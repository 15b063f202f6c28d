"""The model as one picture: its modules as an icicle, as wide as their weights, coloured by what arrives.

The tree is that of the dotted names; a module with a single child is one node with it. What is too small to
be seen is summed up, so that a page of a model with ten thousand tensors stays small. Shares of a module are
of sums over its tensors and the run; those of the whole model are means over steps, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halfulp.report.charts import packed
from halfulp.report.gather import Array, Gathered
from halfulp.report.markup import elided
from halfulp.text import shown
from halfulp.trace.shares import lost_share

NODES = 1200
"""Approximate limit on the nodes of a page."""
SMALLEST = (0.0, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Shares of the weights below which siblings are summed up; the first that gives few enough nodes."""
LABEL, WHOLE = 48, "the model"


@dataclass
class Node:
    """A module, a tensor, or several that are shown as one."""

    label: str
    parent: int
    tensors: list[int]
    """Positions among the trace's tensors."""
    children: dict[str, Node] = field(default_factory=dict)


def tree_data(g: Gathered) -> dict[str, Any]:
    """Return what the picture is drawn from: nodes with parents before children, and shares by grid."""
    tensors = g.trace.tensors
    sizes = np.array([int(t["recorded"]) for t in tensors], dtype=np.int64)
    root = Node(WHOLE, -1, list(range(len(tensors))))
    for i, t in enumerate(tensors):
        at = root
        for part in str(t["name"])[:2000].split(".")[:64]:
            at = at.children.setdefault(part, Node(part, 0, []))
            at.tensors.append(i)
    for least in SMALLEST:
        nodes = _listed(root, sizes, least * float(sizes.sum()))
        if len(nodes) <= NODES:
            break
    members = [np.array(node.tensors) for node in nodes]
    lost, gains, stuck = _over(g, members), _gains(g, members), _stuck(g, members, sizes)
    for i, f in enumerate(g.findings()):  # of the whole model, the numbers that the answer has
        if f.of == 1:
            lost[i][0] = f.lost
            gains[i][0] = np.nan if f.gain is None else f.gain
    weights = [int(sizes[m].sum()) for m in members]
    return {
        "labels": [elided(shown(node.label, 300), LABEL) for node in nodes],
        "parents": [node.parent for node in nodes],
        "weights": weights,
        "tensors": [len(node.tensors) for node in nodes],
        "shapes": [_shape(tensors, node) for node in nodes],
        "lost": [packed(x) for x in lost],
        "arrives": [packed(np.clip(x, 0, 1)) for x in gains],
        "stuck": [packed(x) for x in stuck],
    }


def _shape(tensors: Sequence[dict[str, Any]], node: Node) -> str:
    """Return shape and dtype of a single tensor."""
    if len(node.tensors) != 1 or node.children:
        return ""
    t = tensors[node.tensors[0]]
    return f"{' x '.join(map(str, t['shape']))}, {shown(str(t['stored']), 20)}"


def _listed(root: Node, sizes: Array, least: float) -> list[Node]:
    """Return the nodes of a tree, parents first; small siblings are one."""
    nodes: list[Node] = []
    waiting = [Node(WHOLE, -1, root.tensors, root.children)]
    while waiting:
        node = waiting.pop()
        while len(node.children) == 1:
            (child,) = node.children.values()
            label = child.label if node.label == WHOLE else f"{node.label}.{child.label}"
            node = Node(label, node.parent, child.tensors, child.children)
        nodes.append(node)
        place, small = len(nodes) - 1, []
        below = []
        for child in node.children.values():
            if sizes[child.tensors].sum() < least:
                small += child.tensors
            else:
                below.append(Node(child.label, place, child.tensors, child.children))
        if small:
            below.append(Node(f"{len(small)} small", place, small))
        waiting += below[::-1]
    return nodes


def _sums(values: Array, members: Sequence[Array]) -> Array:
    """Sums over the tensors of each node, of an array (tensors, ...)."""
    return np.stack([values[m].sum(axis=0) for m in members])


def _over(g: Gathered, members: Sequence[Array]) -> list[Array]:
    """Return the share of updates lost, by grid."""
    still = _sums(g.still, members)
    beside = [_sums(x, members) for x in (g.zeros, g.spoilt, g.moves)]
    there = beside[-1] > 0
    return [np.where(there, lost_share(still[:, i], *beside), np.nan) for i in range(len(g.grids))]


def _gains(g: Gathered, members: Sequence[Array]) -> list[Array]:
    """Compute the share of the proposed change that arrives, by grid; NaN where it was not recorded."""
    arrived, proposed = _sums(g.arrived, members), _sums(g.proposed, members)
    with np.errstate(invalid="ignore", divide="ignore"):
        return list(np.where(proposed > 0, arrived / proposed, np.nan).T)


def _stuck(g: Gathered, members: Sequence[Array], sizes: Array) -> list[Array]:
    """Compute the share of weights that never moved, by grid."""
    if not g.trace.manifest["options"]["never_moved"]:
        return [np.full(len(members), np.nan) for _ in g.grids]
    total = np.array([sizes[m].sum() for m in members])
    return list((_sums(g.last_never, members) / total[:, None]).T)
