"""The training loop: nanoGPT's arithmetic, data that depends on seed and update alone, exact resuming."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import halfulp as hu
from halfulp.errors import CorruptionError, UsageError, VersionError
from halfulp.paper.models import training
from halfulp.paper.models.decoder import MODERN, Decoder, DecoderConfig
from halfulp.paper.models.training import Recipe, Schedule, Training, adamw

TINY = DecoderConfig(layers=2, heads=2, width=16, context=8, vocabulary=30, hidden=32)
RECIPE = Recipe(
    schedule=Schedule(peak=6e-3, floor=6e-4, warmup=3, horizon=20), seed=5, updates=20, batch=4, context=8,
    eval_every=6, eval_batches=2,
)  # fmt: skip
TEXT = np.random.default_rng(0).integers(0, 30, 500).astype(np.uint16)

ARMS: dict[str, Callable[[torch.optim.Optimizer, Decoder], torch.optim.Optimizer]] = {
    "fp32": lambda o, model: o,
    "rne": lambda o, model: hu.WriteBack(o, "e5m2", "rne", model=model),
    "sr": lambda o, model: hu.WriteBack(o, "e4m3@128", "sr", model=model, seed=6),
    "eco": lambda o, model: hu.WriteBack(o, "e4m3@128", "eco", model=model),
    "packed": lambda o, model: hu.WriteBack(o, "e4m3@128", "sr", model=model, storage="packed"),
    "master": lambda o, model: hu.WriteBack(o, "bf16", "master", model=model),
}


def begun(
    arm: str = "fp32", recipe: Recipe = RECIPE, config: DecoderConfig = TINY, seed: int = 1
) -> Training:
    model = Decoder(config, seed=seed)
    return Training(model, ARMS[arm](adamw(model, recipe), model), TEXT, recipe, held_out=TEXT[:200])


def weights(run: Training) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


# ---- schedules ------------------------------------------------------------------------------------------


def nanogpt_rate(it: int, peak: float, floor: float, warmup: int, horizon: int) -> float:
    """``get_lr`` of nanoGPT's train.py, which counts iterations from zero."""
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    if it > horizon:
        return floor
    ratio = (it - warmup) / (horizon - warmup)
    return floor + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (peak - floor)


def test_schedule_is_nanogpts_to_the_bit() -> None:
    schedule = Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000)
    for update in range(1, 3201):
        assert schedule.rate(update) == nanogpt_rate(update - 1, 6e-4, 6e-5, 100, 3000)


def test_zero_based_indexing_is_the_papers() -> None:
    """Appendix C: 5.940594e-4 on update 100, the peak on 101, 1.5843e-10 above the floor on 3000."""
    schedule = Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000)
    assert f"{schedule.rate(100):.6e}" == "5.940594e-04"
    assert schedule.rate(101) == max(map(schedule.rate, range(1, 3001))) == 6e-4
    assert f"{schedule.rate(3000) - 6e-5:.4e}" == "1.5843e-10"
    declared = replace(schedule, zero_based=False)
    assert declared.rate(100) == 6e-4
    assert declared.rate(3000) == 6e-5


def test_constant_mid_holds() -> None:
    schedule = Schedule(peak=3e-4, floor=3e-4, warmup=100, horizon=3000)
    assert {schedule.rate(u) for u in range(101, 3001)} == {3e-4}
    assert [schedule.rate(u) for u in (1, 100)] == [3e-4 / 101, 3e-4 * 100 / 101]


def test_cosine_restart_has_two_equal_cycles() -> None:
    schedule = Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000, cycles=2)
    first = [schedule.rate(u) for u in range(101, 1551)]
    second = [schedule.rate(u) for u in range(1551, 3001)]
    np.testing.assert_allclose(first, second, rtol=1e-12)  # the same cosine of a quotient taken twice
    assert first[0] == second[0] == 6e-4
    assert all(a > b for a, b in itertools.pairwise(first))
    assert 6e-5 < first[-1] < 6.001e-5


@pytest.mark.parametrize("wrong", [{"warmup": 20}, {"floor": 1.0}, {"cycles": 0}, {"warmup": -1}])
def test_schedules_that_have_no_meaning(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a schedule needs"):
        replace(RECIPE.schedule, **wrong)


# ---- data -----------------------------------------------------------------------------------------------


def test_starts_are_a_function() -> None:
    """Known values, so that a change of the order is noticed: published results depend on them."""
    assert training.starts(1337, "training", 1, 4, 1_003_726).tolist() == KNOWN_STARTS
    assert training.starts(1337, "training", 2, 4, 1_003_726).tolist() != KNOWN_STARTS
    assert training.starts(1338, "training", 1, 4, 1_003_726).tolist() != KNOWN_STARTS
    assert training.starts(1337, "evaluation", 1, 4, 1_003_726).tolist() != KNOWN_STARTS


KNOWN_STARTS = [798749, 153412, 746531, 149048]


def test_starts_reach_every_part_of_a_large_file() -> None:
    """OpenWebText has nine billion tokens, more than 32 bits tell apart."""
    choices = 9_035_582_198
    drawn = training.starts(0, "training", 1, 4000, choices)
    counts, _ = np.histogram(drawn, bins=8, range=(0, choices))
    # Expected 500 a part; six standard deviations of sqrt(4000 * 1/8 * 7/8) = 21.
    assert int(np.abs(counts - 500).max()) < 126
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < choices


def test_target_is_the_next_token() -> None:
    x, y = training.sequences(TEXT, np.array([0, 17]), 8, torch.device("cpu"))
    assert x.tolist() == [TEXT[:8].tolist(), TEXT[17:25].tolist()]
    assert y.tolist() == [TEXT[1:9].tolist(), TEXT[18:26].tolist()]


def test_last_sequence_fits() -> None:
    """A text one token longer than the context has one sequence; one as long has none."""
    assert set(training.starts(0, "training", 1, 50, 1).tolist()) == {0}
    run = Training(Decoder(TINY), adamw(Decoder(TINY), RECIPE), TEXT[:8], RECIPE)
    with pytest.raises(UsageError, match="not longer than the context"):
        run.step()


# ---- the loop -------------------------------------------------------------------------------------------


def by_hand(recipe: Recipe, config: DecoderConfig, updates: int) -> tuple[list[torch.Tensor], list[float]]:
    """The same run as a nanoGPT-style loop, without halfulp's."""
    model = Decoder(config, seed=1)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)
    losses = []
    for it in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = nanogpt_rate(it, 6e-3, 6e-4, 3, 20)
        at = training.starts(recipe.seed, "training", it + 1, recipe.batch, len(TEXT) - 8)
        rows = torch.tensor(np.stack([TEXT[i : i + 9] for i in at]).astype(np.int64))
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 30), rows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return [p.detach() for p in model.parameters()], losses


@pytest.mark.parametrize(
    "config", [TINY, replace(MODERN, layers=2, heads=2, width=16, context=8, vocabulary=30, hidden=40)]
)
def test_a_run_is_the_plain_loop(config: DecoderConfig) -> None:
    """To the bit: weights and losses, over warmup and decay."""
    run = begun(config=config)
    losses = [float(run.step()) for _ in range(12)]
    expected, told = by_hand(RECIPE, config, 12)
    assert losses == told
    assert all(torch.equal(a, b) for a, b in zip(weights(run), expected, strict=True))


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_micro_batches_add_up(micro: int) -> None:
    """The same sequences and, but for the order of a float32 sum, the same gradient."""
    whole, parts = begun(), begun(recipe=replace(RECIPE, micro=micro))
    # Clipped gradients stay on the parameters; a mean over 4 x 8 tokens in another order: a few ulps.
    assert float(whole.step()) == pytest.approx(float(parts.step()), rel=1e-6)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def test_gradient_is_clipped() -> None:
    run = begun(recipe=replace(RECIPE, clip=0.01))
    run.step()
    norm = torch.stack([p.grad.norm() for p in run.model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-4)  # torch divides by the norm plus 1e-6


def test_evaluation_does_not_depend_on_the_run() -> None:
    """The same batches at any time, in any micro-batch, and training is as if it had not been."""
    run, twin = begun(), begun()
    before = run.evaluate()
    assert before == run.evaluate() == twin.evaluate()
    run.step(), twin.step()
    after = run.evaluate()
    assert after != before
    run.step(), twin.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(run), weights(twin), strict=True))
    by_one = begun(recipe=replace(RECIPE, micro=1)).evaluate()
    assert by_one == pytest.approx(before, rel=1e-6)  # float32 means over other parts
    x, y = zip(
        *(
            training.sequences(
                TEXT[:200], training.starts(4242, "evaluation", i, 4, 192), 8, torch.device("cpu")
            )
            for i in range(2)
        ),
        strict=True,
    )
    with torch.no_grad():
        assert float(begun().model.loss(torch.cat(x), torch.cat(y))) == pytest.approx(before, rel=1e-6)


def test_evaluations_are_after_update_one_and_every_so_many() -> None:
    """As the paper's: every 250 updates counted from zero, so after 1, 251, ..., 3001, ..., and the last."""
    recipe = replace(RECIPE, updates=10_000, eval_every=250)
    due = [u for u in range(1, 10_001) if recipe.evaluates(u)]
    assert due[:3] == [1, 251, 501]
    assert 3001 in due
    assert due[-2:] == [9751, 10_000]
    assert len(due) == 41


# ---- arms -----------------------------------------------------------------------------------------------


def test_arms_share_data_and_codes() -> None:
    """Nearest and stochastic arms start from the same codes and see the same sequences."""
    model_a, model_b = Decoder(TINY, seed=1), Decoder(TINY, seed=1)
    a = hu.WriteBack(adamw(model_a, RECIPE), "e5m2", "rne", model=model_a)
    b = hu.WriteBack(adamw(model_b, RECIPE), "e5m2", "sr", model=model_b, seed=2)
    runs = [Training(m, o, TEXT, RECIPE) for m, o in ((model_a, a), (model_b, b))]
    assert all(torch.equal(p, q) for p, q in zip(*map(weights, runs), strict=True))
    first = [float(run.step()) for run in runs]
    assert first[0] == first[1]
    assert float(runs[0].step()) != float(runs[1].step())
    anchor = Decoder(TINY, seed=1)
    training.project(anchor, "e5m2")
    start = begun("rne")
    assert all(torch.equal(p, q) for p, q in zip(anchor.parameters(), weights(start), strict=True))


def test_audit_and_write_back_attach_from_outside() -> None:
    """An audit changes nothing; a write-back leaves every matrix on the grid."""
    plain, watched = begun("sr"), begun("sr")
    seen: list[float] = []
    audit = hu.Audit(
        watched.optimizer, ["e4m3@128", "bf16"], model=watched.model,
        listeners=[lambda s: seen.append(s["frozen"]["bf16"])],
    )  # fmt: skip
    with audit:
        losses = [(float(plain.step()), float(watched.step())) for _ in range(4)]
    assert all(a == b for a, b in losses)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(watched), strict=True))
    assert len(seen) == 4
    grid = hu.grid("e4m3@128")
    assert all(torch.equal(grid.round(w), w) for w in weights(plain) if w.dim() >= 2)


# ---- stopping and going on ------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_interrupted_at_any_step(arm: str) -> None:
    """Twenty steps, stopped and taken up by a new process' worth of objects after each of 0..19: equal bits.

    The saved bytes hold weights, moments, codes, moved bits, masters and the stream's position.
    """
    whole, states = begun(arm), []
    losses = []
    while not whole.done:
        states.append(whole.save({"at": whole.update}, {"mine": torch.tensor([whole.update])}))
        losses.append(float(whole.step()))
    final = whole.save()
    for k, state in enumerate(states):
        run = begun(arm)
        for _ in range(k % 3):  # whatever it did before is forgotten
            run.step()
        notes, kept = run.load(state)
        assert (notes, kept["mine"].tolist()) == ({"at": k}, [k])
        assert [float(run.step()) for _ in range(k, 20)] == losses[k:]
        assert run.done
        assert run.save() == final


def test_saved_state_has_everything() -> None:
    """Weights, moments and step count of every parameter, and which coordinates of a matrix moved."""
    run = begun("sr")
    for _ in range(3):
        run.step()
    state = run.save()
    tensors = load_tensors(state)
    moved = [name for name in tensors if name.endswith("halfulp.moved")]
    moments = [name for name in tensors if name.endswith(("exp_avg", "exp_avg_sq", "step"))]
    assert len(moved) == sum(p.dim() >= 2 for p in run.model.parameters())
    assert len(moments) == 3 * len(list(run.model.parameters()))
    assert {n.removeprefix("model/") for n in tensors if n.startswith("model/")} == {
        name for name, _ in run.model.named_parameters()
    }


def test_resuming_a_whole_run_is_idle() -> None:
    run = begun()
    while not run.done:
        run.step()
    again = begun()
    again.load(run.save())
    assert again.done


def test_the_reference_lists_the_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "files.md").read_text()
    assert f"| a training state of a decoder | {training.VERSION} | {training.VERSION} |" in page


def test_state_of_another_recipe_is_refused() -> None:
    state = begun().save()
    other = begun(recipe=replace(RECIPE, seed=6, batch=2))
    with pytest.raises(UsageError, match="another recipe: it has seed 5, batch 4"):
        other.load(state)


def test_state_of_another_arm_is_refused() -> None:
    for mine, theirs in (("sr", "fp32"), ("fp32", "sr")):
        with pytest.raises(UsageError, match="of another arm: only one of the two has a write-back"):
            begun(mine).load(begun(theirs).save())


def changed(state: bytes, **cursor: Any) -> bytes:
    tensors = load_tensors(state)
    content = {**json.loads(bytes(tensors["cursor"].numpy())), **cursor}
    tensors["cursor"] = torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)
    return bytes(save_tensors(tensors))


def test_damaged_states_are_refused() -> None:
    state = begun().save()
    for wrong in (b"", b"x" * 100, state[:-1], state[: len(state) // 2]):
        with pytest.raises(CorruptionError, match="not the state of a training run"):
            begun().load(wrong)
    with pytest.raises(VersionError, match="version 99"):
        begun().load(changed(state, version=99))


def test_recipe_survives_json() -> None:
    assert Recipe.from_json(json.loads(json.dumps(RECIPE.to_json()))) == RECIPE


@pytest.mark.parametrize("wrong", [{"updates": 0}, {"batch": 0}, {"micro": 0}, {"eval_every": 0}])
def test_recipes_that_have_no_meaning(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        replace(RECIPE, **wrong)


def test_context_must_fit_the_model() -> None:
    with pytest.raises(UsageError, match="context of 9 is more than the model's 8"):
        begun(recipe=replace(RECIPE, context=9))


def test_nothing_to_evaluate_on() -> None:
    model = Decoder(TINY)
    with pytest.raises(UsageError, match="no held-out text"):
        Training(model, adamw(model, RECIPE), TEXT, RECIPE).evaluate()
