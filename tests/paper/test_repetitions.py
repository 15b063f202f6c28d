"""What arms cost: processes in rotated order, bytes that persist, and the peak of an update."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoder_cells import Here, write_corpora

from halfulp.paper.arms import Arm, Bundle, repetitions
from halfulp.paper.arms.mask_recipes import Ranked, pack
from halfulp.paper.models.decoder import Decoder
from halfulp.paper.studies import _systems, eco_systems, packed_systems
from halfulp.study.protocol import Outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("data"))


def one_seed(runs: Bundle) -> Bundle:
    return replace(runs, targets=runs.targets[:1])


def test_pairs_and_medians_may_disagree() -> None:
    """The paper's systems artifact: paired -0.259%, of the arms' medians +0.076%."""
    blanket = (100.0, 98.0, 101.0)
    packed = tuple(b * (1 + r) for b, r in zip(blanket, (-0.00556, 0.00352, -0.00259), strict=True))
    rows = [
        {"measured": [{"arm": "packed", "updates": 1, "window_seconds": 1 / p},
                      {"arm": "master", "updates": 1, "window_seconds": 1 / b}]}
        for p, b in zip(packed, blanket, strict=True)
    ]  # fmt: skip
    found = Outcomes({"costs": {f"repetition-{i}": row for i, row in enumerate(rows, 1)}})
    paired = _systems.paired(found, "packed", "master", "throughput")["median"]
    unpaired = _systems.unpaired(found, "packed", "master", "throughput")["median"]
    assert paired is not None
    assert unpaired is not None
    assert round(paired, 5) == -0.00259
    assert unpaired != paired


def test_orders_are_rotated() -> None:
    cells = packed_systems.STUDY.cells("paper", "costs")
    orders = [cell.config["order"] for cell in cells]
    assert sum(map(len, orders)) == 15
    assert sum(len(c.config["order"]) for c in eco_systems.STUDY.cells("paper", "costs")) == 16
    assert [order[0] for order in orders] == list(packed_systems.ARMS[:3])
    assert all(sorted(order) == sorted(packed_systems.ARMS) for order in orders)


def asked(arm: Arm, folder: Path, masks: bytes = b"") -> dict[str, Any]:
    files = {name: str(folder / name) for name in ("tinyshakespeare.txt",)}
    return {
        "arm": arm.to_json(),
        "updates": 1,
        "warm": 1,
        "data": files,
        "masks": base64.b64encode(masks).decode(),
    }


def test_what_persists_is_counted(folder: Path) -> None:
    """Weights and two moments; masters for all; packed masters with an index a tile; ECO nothing."""
    runs = one_seed(packed_systems.RUNS)
    config = _systems.configs(runs)["smoke"]
    cell = next(_systems.timed(runs, (*packed_systems.ARMS, "eco"))(config))
    arms = {name: Arm.from_json(arm) for name, arm in cell.config["arms"].items()}
    model = Decoder(arms["rne"].model, device="meta")
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.dim() >= 2}
    every = sum(p.numel() for p in model.parameters())
    made = Ranked(sizes, arms["rne"].tile).masks({"P": {"random": 1, "share": 0.1}})
    found = {name: repetitions.measure(asked(arm, folder, pack(made))) for name, arm in arms.items()}
    step = 4 * len(list(model.parameters()))  # torch counts steps in a tensor a parameter
    for name in ("rne", "eco", "fp32", "trace"):
        assert found[name]["persistent_bytes"] == 3 * 4 * every + step, name
        assert found[name]["policy_bytes"] == 0
    assert found["master"]["policy_bytes"] == 4 * sum(sizes.values())
    chosen = sum(int(t.sum()) for t in made["P"].tiles.values())
    assert found["source-P"]["policy_bytes"] == made["P"].payload_bytes + _systems.INDEX_BYTES * chosen
    assert found["source-P"]["persistent_bytes"] == 3 * 4 * every + step + found["source-P"]["policy_bytes"]
    for row in found.values():
        assert 0 < row["window_seconds"] <= row["wall_seconds"]
        assert row["counted_bytes"] > row["persistent_bytes"] + 4 * every  # gradients and activations


def test_counted_bytes_are_the_same_again(folder: Path) -> None:
    """What tensors hold at the peak of an update is a fact of the arm, not of the machine."""
    runs = one_seed(packed_systems.RUNS)
    cell = next(_systems.timed(runs, ("rne", "master"))(_systems.configs(runs)["smoke"]))
    arms = {name: Arm.from_json(arm) for name, arm in cell.config["arms"].items()}
    first, again = (
        {n: repetitions.measure(asked(arm, folder, b""))["counted_bytes"] for n, arm in arms.items()}
        for _ in range(2)
    )
    assert first == again
    masters = 4 * sum(
        p.numel() for p in Decoder(arms["rne"].model, device="meta").parameters() if p.dim() >= 2
    )
    assert first["master"] - first["rne"] >= masters


def test_a_fresh_process(folder: Path) -> None:
    """A repetition asks processes, one after the other, and keeps their rows in order."""
    runs = one_seed(packed_systems.RUNS)
    cell = next(iter(_systems.timed(runs, ("rne",))(_systems.configs(runs)["smoke"])))
    here = Here(cell.config, folder)
    record = repetitions.repetition(here)
    assert [row["arm"] for row in record["measured"]] == ["rne"]
    broken = {**cell.config["arms"]["rne"], "grid": "e5m2", "policy": "no such policy"}
    with pytest.raises(Exception, match="policy"):
        repetitions.repetition(Here({**cell.config, "arms": {"rne": broken}}, folder))
