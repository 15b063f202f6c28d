"""The fix that is printed is the one for the code at hand, and it works as it is printed.

Each program runs once as it is, under an audit, and once more with the printed lines pasted in. torchtune,
torchtitan and TRL are recognised by their modules; here small packages of their names stand in for them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_traces import synthetic

import halfulp as hu
from halfulp.verdicts.answer import Answer
from halfulp.verdicts.findings import keeping
from halfulp.verdicts.fix import Caller, fix_of

HEAD = """
import torch
torch.manual_seed(0)
def batch(step):
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
def build():
    parts = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 16)
    return torch.nn.Sequential(*parts).bfloat16()
"""
LOOP = """
net = build()
opt = MAKE
# FIX
for step in range(8):
    opt.zero_grad()
    (net(batch(step)) - batch(step)).square().mean().backward()
    opt.step()
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
# FIX
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(8):
    optimizer.zero_grad()
    accelerator.backward((model(batch(step)) - batch(step)).square().mean())
    optimizer.step()
"""
LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer
class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = build()
    def training_step(self, x, index):
        return (self.net(x) - x).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5, eps=1e-6)
        # FIX
        return optimizer
data = torch.utils.data.DataLoader([batch(i)[0] for i in range(16)], batch_size=2)
quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
Trainer(max_steps=8, accelerator="cpu", **dict.fromkeys(quiet, False)).fit(Small(), data)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
IMPORT
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()
    def forward(self, x, labels=None):
        return {"loss": (self.net(x) - x).square().mean()}
data = [{"x": batch(i)[0], "labels": 0} for i in range(16)]
quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
arguments = TrainingArguments(
    "out", max_steps=8, per_device_train_batch_size=2, learning_rate=RATE, **quiet, WITH
)
model = Model()
trainer = TRAINER(model=model, args=arguments, train_dataset=data)
# FIX
trainer.train()
"""
TRL = """
from transformers import Trainer
class SFTTrainer(Trainer):
    def __init__(
        self, model=None, args=None, train_dataset=None, optimizers=(None, None),
        optimizer_cls_and_kwargs=None,
    ):
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
"""
TORCHTITAN = """
import torch
class OptimizersContainer:
    def __init__(self, optimizers):
        self.optimizers = optimizers
    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
class Trainer:
    def __init__(self, parts):
        self.model_parts = parts
        self.optimizers = OptimizersContainer([torch.optim.AdamW(p.parameters(), lr=1e-5) for p in parts])
    def train(self, batch):
        for step in range(8):
            x = y = batch(step)
            for part in self.model_parts:
                part.zero_grad()
                y = part(y)
            (x - y).square().mean().backward()
            self.optimizers.step()
"""
TITAN = """
from torchtitan.train import Trainer
trainer = Trainer([build(), build()])
# FIX
trainer.train(batch)
"""
TORCHTUNE = """
import importlib
class Recipe:
    def __init__(self, config, model, batch):
        self._model, self.batch = model, batch
        module, _, name = config.pop("_component_").rpartition(".")
        self._optimizer = getattr(importlib.import_module(module), name)(model.parameters(), **config)
    def train(self):
        for step in range(8):
            self._optimizer.zero_grad()
            (self._model(self.batch(step)) - self.batch(step)).square().mean().backward()
            self._optimizer.step()
"""
TUNE = """
from torchtune.recipe import Recipe
config = {"_component_": "torch.optim.AdamW", "lr": 1e-5, "fused": True}
# FIX
Recipe(config, build(), batch).train()
"""


def audited(text: str, folder: Path) -> tuple[hu.Memory, Answer]:
    """Run a program, and answer for it."""
    memory = hu.Memory()
    program = compile(textwrap.dedent(HEAD + text), str(folder / "train.py"), "exec")
    with hu.Audit(None, ["bf16"], out=memory):
        exec(program, {"__name__": "__main__"})  # noqa: S102  # the programs above
    return memory, hu.verdict(memory.trace)


def pasted(text: str, code: tuple[str, ...]) -> str:
    """The program with the printed lines where it says FIX; ``...`` are the arguments that are there."""
    (place,) = re.findall(r"^( *)# FIX$", text, re.MULTILINE)
    lines = "\n".join(f"{place}{line}" for line in code)
    return text.replace(f"{place}# FIX", lines)


def fixed(
    text: str, expected: str, folder: Path, paste: Callable[[str, tuple[str, ...]], str] = pasted
) -> Answer:
    """Run a program, paste the fix that is printed, run it again: lost before, kept after."""
    _, before = audited(text, folder)
    assert before.headline.startswith("This run LOST ")
    assert before.fix is not None
    assert before.fix.code[-1] == expected
    assert all(line in str(before) for line in before.fix.code)
    _, after = audited(paste(text, before.fix.code), folder)
    assert after.headline.startswith("Nothing lost: sr write-back carries the updates to bf16")
    lost, kept = (a.findings[0].never_moved for a in (before, after))
    assert lost is not None
    assert kept is not None
    assert kept < lost - 0.05
    assert after.fix is None
    return before


AROUND = 'opt = hu.WriteBack(opt, "bf16", "sr", model=net)'
OWN = "opt = hu.AdamW(net.named_parameters(), lr=1e-5)"
ALL = "lr=2e-5, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1"
GROUPS = "[{'params': net[0].parameters(), 'weight_decay': 0.1}, {'params': net[1:].parameters()}]"
OPTIMIZERS = {
    "AdamW": ("AdamW(net.parameters(), lr=1e-5)", OWN),
    "all arguments": (f"AdamW(net.parameters(), {ALL})", f"opt = hu.AdamW(net.named_parameters(), {ALL})"),
    "Adam": ("Adam(net.parameters(), lr=1e-5)", OWN.replace("AdamW", "Adam")),
    "fused": ("AdamW(net.parameters(), lr=1e-5, fused=True)", OWN),
    "foreach": ("AdamW(net.parameters(), lr=1e-5, foreach=True)", OWN),
    "amsgrad": ("AdamW(net.parameters(), lr=1e-5, amsgrad=True)", AROUND),
    "coupled": ("Adam(net.parameters(), lr=1e-5, decoupled_weight_decay=True)", AROUND),
    "SGD": ("SGD(net.parameters(), lr=1e-2)", AROUND),
    "groups": (f"AdamW({GROUPS}, lr=1e-5)", AROUND),
    "a part of the model": ("AdamW(net[0].parameters(), lr=1e-5)", AROUND),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop(name: str, tmp_path: Path) -> None:
    make, expected = OPTIMIZERS[name]
    answer = fixed(LOOP.replace("MAKE", f"torch.optim.{make}"), expected, tmp_path)
    assert answer.fix is not None
    cost = {
        "SGD": "2 -> 2 bytes per weight; or float32 weights with autocast (4).",
        "amsgrad": "8 -> 14 bytes per weight; or float32 weights with autocast (16).",
    }
    usual = "6 -> 10 bytes per weight"
    assert answer.section("Fix")[-1] == cost.get(name, answer.section("Fix")[-1])
    assert usual in str(answer) or name in cost


def test_a_schedule_does_not_change_the_rate_that_is_printed(tmp_path: Path) -> None:
    """Warmup sets the group's rate, a loop of one's own sets it at every step: the base rate is printed."""
    loop = LOOP.replace("MAKE", "torch.optim.AdamW(net.parameters(), lr=1e-5)")
    warm = loop.replace("# FIX", "# FIX\nwarm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 4)").replace(
        "    opt.step()\n", "    opt.step()\n    warm.step()\n"
    )
    own = loop.replace(
        "    opt.step()\n", "    opt.param_groups[0]['lr'] = 1e-6 * (step + 1)\n    opt.step()\n"
    )
    for text in (warm, own):
        fixed(text, "opt = hu.AdamW(net.named_parameters(), lr=1e-5)", tmp_path)
    fixed(LOOP.replace("MAKE", "torch.optim.AdamW([{'params': net.parameters(), 'lr': 1e-5}])"),
          "opt = hu.AdamW(net.named_parameters(), lr=1e-5)", tmp_path)  # fmt: skip


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = "optimizer = hu.AdamW(model.named_parameters(), lr=1e-5, weight_decay=0.1)"
    fixed(ACCELERATE, f"{expected}  # before accelerator.prepare()", tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning's own, under this torch
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = "optimizer = hu.AdamW(self.named_parameters(), lr=1e-5, eps=1e-6)"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        fixed(LIGHTNING, f"{expected}  # in configure_optimizers()", tmp_path)


def constructed(text: str, code: tuple[str, ...]) -> str:
    """The line of the trainer, replaced by the printed one."""
    made = code[-1].replace("...", "model=model, args=arguments, train_dataset=data")
    return re.sub(r"trainer = .*", lambda _: f"{code[0]}\ntrainer = {made}", text)


@pytest.mark.parametrize(
    ("given", "expected", "paste"),
    [
        (
            "",
            "Trainer(..., optimizers=(hu.AdamW(model.named_parameters(), lr=1e-5, weight_decay=0.0), None))",
            constructed,
        ),
        (
            "weight_decay=0.1, adam_beta2=0.95",
            'Trainer(..., optimizer_cls_and_kwargs=(hu.AdamW, {"lr": 1e-5, "betas": (0.9, 0.95)}))',
            constructed,
        ),
        (
            "optim='sgd'",
            'trainer.optimizer = hu.WriteBack(trainer.create_optimizer(), "bf16", "sr", '
            "model=trainer.model)  # before trainer.train()",
            pasted,
        ),
    ],
)
@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_trainers(
    kind: str, given: str, expected: str, paste: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, monkeypatch, "trl", "trainer", TRL)
    text = (
        TRAINER.replace("WITH", given)
        .replace("RATE", "1e-2" if "sgd" in given else "1e-5")
        .replace("TRAINER", kind)
    )
    text = text.replace("IMPORT", "from trl.trainer import SFTTrainer" if kind == "SFTTrainer" else "")
    answer = fixed(text, expected.replace("Trainer(...", f"{kind}(..."), tmp_path, paste)
    assert answer.fix is not None
    assert answer.fix.framework == ("trl" if kind == "SFTTrainer" else "transformers")


def stand_in(folder: Path, patch: pytest.MonkeyPatch, package: str, module: str, text: str) -> None:
    """A package of this name that comes before any other."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    (folder / package / f"{module}.py").write_text(text)
    patch.syspath_prepend(str(folder))
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        patch.delitem(sys.modules, name)


def test_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "torchtitan", "train", TORCHTITAN)
    expected = (
        'trainer.optimizers.optimizers[:] = [hu.WriteBack(o, "bf16", "sr", model=m) '
        "for o, m in zip(trainer.optimizers.optimizers, trainer.model_parts)]  # before trainer.train()"
    )
    fixed(TITAN, expected, tmp_path)


def test_torchtune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The override of a configuration, as ``tune run`` reads it."""
    stand_in(tmp_path, monkeypatch, "torchtune", "recipe", TORCHTUNE)

    def overridden(text: str, code: tuple[str, ...]) -> str:
        key, _, value = code[0].removeprefix("tune run ... ").partition("=")
        assert key == "optimizer._component_"
        return text.replace("# FIX", f'config["_component_"] = {value!r}')

    fixed(TUNE, "tune run ... optimizer._component_=halfulp.AdamW", tmp_path, overridden)


def test_a_write_back_that_rounds_to_nearest(tmp_path: Path) -> None:
    make = 'hu.AdamW(net.parameters(), lr=1e-5, policy="rne")'
    text = f"import halfulp as hu\n{LOOP}".replace("MAKE", make)

    def replaced(text: str, code: tuple[str, ...]) -> str:
        return text.replace(make, code[0].replace("...", "net.parameters(), lr=1e-5"))

    fixed(text, 'hu.AdamW(..., policy="sr")  # in place of the policy "rne"', tmp_path, replaced)


def test_some_weights_in_bfloat16(tmp_path: Path) -> None:
    """The others stay as they are."""
    text = LOOP.replace("MAKE", "torch.optim.AdamW(net.parameters(), lr=1e-5)")
    text = text.replace("net = build()", "net = build()\nnet[2].float()")
    text = text.replace("net(batch(step))", "net[2](net[:2](batch(step)).float())")
    expected = (
        'opt = hu.WriteBack(opt, "bf16", "sr", params=lambda name, p: p.dtype.itemsize == 2, model=net)'
    )
    fixed(text, expected, tmp_path)


def test_weights_that_do_not_lie_in_order(tmp_path: Path) -> None:
    """Those of a channels_last convolution: hu.AdamW refuses them, a write-back does not."""
    text = LOOP.replace("MAKE", "torch.optim.AdamW(net.parameters(), lr=1e-5)")
    turned = "net = build()\nnet[0].weight.data = net[0].weight.data.t().contiguous().t()"
    fixed(text.replace("net = build()", turned), AROUND, tmp_path)


def test_a_float32_run_is_told_how_to_store_them(tmp_path: Path) -> None:
    """Nothing is lost now, so there is nothing to mend; the line says how a format keeps its updates."""
    text = LOOP.replace("MAKE", "torch.optim.AdamW(net.parameters(), lr=1e-5)").replace(
        "net = build()", "net = build().float()"
    )
    text = text.replace("batch(step)", "batch(step).float()")
    _, answer = audited(text, tmp_path)
    assert answer.headline.startswith("Nothing is lost in float32. Stored in bf16, this run would lose ")
    assert answer.code[-1] == 'opt = hu.WriteBack(opt, "bf16", "sr", model=net)'
    _, after = audited(pasted(text, answer.code), tmp_path)
    assert after.headline.startswith("Nothing lost: sr write-back")


TWO = """
one, two = torch.nn.Linear(16, 16).bfloat16(), torch.nn.Linear(16, 16).bfloat16()
NAMES = torch.optim.AdamW(one.parameters(), lr=1e-5), torch.optim.SGD(two.parameters(), lr=1e-4)
# FIX
for step in range(8):
    for opt in OPTS:
        opt.zero_grad()
    (two(one(batch(step))) - batch(step)).square().mean().backward()
    for opt in OPTS:
        opt.step()
"""


def test_several_optimizers(tmp_path: Path) -> None:
    """Each that loses gets its line; those without a name of their own are counted."""
    text = TWO.replace("NAMES", "first, second").replace("for opt in OPTS:", "for opt in (first, second):")
    answer = fixed(text, 'second = hu.WriteBack(second, "bf16", "sr", model=two)', tmp_path)
    assert answer.code[1] == 'first = hu.WriteBack(first, "bf16", "sr", model=one)'
    _, listed = audited(TWO.replace("NAMES", "OPTS").replace("opt.step()", "opt.step() or None"), tmp_path)
    assert listed.code[-1] == "# the same for 1 more optimizer"


def test_a_write_back_around_one_of_two_optimizers(tmp_path: Path) -> None:
    """What is said is of the other, whose updates are lost."""
    wrapped = '# FIX\nimport halfulp as hu\nfirst = hu.WriteBack(first, "bf16", "sr", model=one)'
    text = TWO.replace("NAMES", "first, second").replace("for opt in OPTS:", "for opt in (first, second):")
    text = text.replace("# FIX", wrapped)
    before = fixed(text, 'second = hu.WriteBack(second, "bf16", "sr", model=two)', tmp_path)
    assert before.findings[0].of == 0.5
    assert "the sr write-back does not have 2 of 4 tensors (bfloat16)" in str(before)


@pytest.mark.parametrize("own", [True, False])
def test_a_write_back_of_some_tensors_only(own: bool, tmp_path: Path) -> None:
    """The others lose their updates, as norm gains in bfloat16 beside weights in fp8 do."""
    of = "'params': [p for p in net.parameters() if p.dim()"
    groups = f"[{{{of} > 1]}}, {{{of} < 2], 'grid': 'bf16'}}]"
    wrap = 'opt = hu.WriteBack(torch.optim.AdamW(GROUPS, lr=1e-5), "e4m3@128", "sr", model=net, CHOICE)'
    if own:
        groups, wrap = "net.parameters()", "opt = hu.AdamW(GROUPS, lr=1e-5, CHOICE)"
    text = LOOP.replace("opt = MAKE", f"import halfulp as hu\n{wrap}").replace("GROUPS", groups)
    some = "select=lambda name, p: p.dim() > 1" if own else "params=lambda name, p: p.dim() > 1"
    memory, before = audited(text.replace("CHOICE", some), tmp_path)
    assert before.headline.startswith("This run LOST ")
    assert before.grid == "bf16"
    assert before.findings[0].of == pytest.approx(112 / 1136)
    assert keeping(memory.trace, "bf16") is None
    assert before.fix is not None
    told = "hu.AdamW(..., select=" if own else "hu.WriteBack(..., params="
    assert before.fix.code == (
        f'{told}lambda name, p: True)  # what it left out: in a group {{"params": [...], "grid": "bf16"}}',
    )
    all_ = some.replace("p.dim() > 1", "True")
    memory, after = audited(text.replace("CHOICE", all_), tmp_path)
    assert after.headline.startswith("Nothing lost: sr write-back carries the updates to ")
    assert keeping(memory.trace, "bf16") == "sr"


@pytest.mark.parametrize("grid", ['"bfloat16"', "torch.bfloat16", "hu.grid('bfloat16')"])
def test_a_write_back_of_some_tensors_to_the_grid_of_the_others(grid: str, tmp_path: Path) -> None:
    wrap = f'hu.WriteBack(torch.optim.AdamW(net.parameters(), lr=1e-5), {grid}, "sr", model=net, CHOICE)'
    text = LOOP.replace("opt = MAKE", f"import halfulp as hu\nopt = {wrap}")
    memory, before = audited(text.replace("CHOICE", "params=lambda name, p: p.dim() > 1"), tmp_path)
    assert before.headline.startswith("This run LOST ")
    assert keeping(memory.trace, "bf16") is None
    _, after = audited(text.replace("CHOICE", "params=lambda name, p: True"), tmp_path)
    assert after.headline.startswith("Nothing lost: sr write-back carries the updates to ")


def test_layers_that_are_unfrozen_later_are_kept(tmp_path: Path) -> None:
    """A write-back takes them up by itself, so they are not among what it left out."""
    text = LOOP.replace("MAKE", "hu.AdamW(net.named_parameters(), lr=1e-5)")
    text = text.replace("net = build()", "import halfulp as hu\nnet = build()\nnet[0].requires_grad_(False)")
    text = text.replace("    opt.zero_grad()", "    net[0].requires_grad_(step > 3)\n    opt.zero_grad()")
    memory, answer = audited(text, tmp_path)
    assert answer.headline.startswith("Nothing lost: sr write-back carries the updates to bf16")
    (held,) = (o["holds"]["parameters"] for o in memory.trace.manifest["optimizers"])
    assert held == {"bf16 written by sr, in bfloat16": 592, "frozen in bfloat16": 544}


def test_a_rate_is_named_at_which_steps_are_too_small(tmp_path: Path) -> None:
    """A schedule that begins with a rate that loses next to nothing loses at its end."""
    loop = LOOP.replace("MAKE", "torch.optim.AdamW(net.parameters(), lr=1e-1)").replace(
        "range(8)", "range(20)"
    )
    text = loop.replace("# FIX", "# FIX\nends = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)").replace(
        "    opt.step()\n", "    opt.step()\n    ends.step()\n"
    )
    (why,) = audited(text, tmp_path)[1].section("Why")
    assert why.endswith("; at the end, at lr 1.9e-7, most steps are under half a gap.")


# ---- what a manifest may say ------------------------------------------------------------------------------


def test_nothing_of_a_manifest_is_believed(tmp_path: Path) -> None:
    """Names that are no names, classes and arguments that are code: none of it is in a line to paste."""
    trace = synthetic(tmp_path / "run", grids=["bf16"])
    evil = "__import__('os').system('x')"
    for framework in ("loop", "transformers", "trl", "lightning", evil, 7, None, ["loop"], {}):
        trace.manifest["run"]["caller"] = {
            "framework": framework, "class": evil, "takes": ["optimizers", evil, 3],
            "names": {"optimizer": evil, "model": f"model\n{evil}", "trainer": 3}, "whole": True,
        }  # fmt: skip
        trace.manifest["optimizers"] = [
            {"class": evil, "one_pass": True, "defaults": {"lr": evil}, "groups": [{"lr": evil}]},
            {"class": "AdamW", "one_pass": True, "groups": "x"},
        ]  # fmt: skip
        for stored in (0.0, 1.0):
            fix = fix_of(trace, "bf16", stored=stored)
            assert fix is not None
            assert "import__" not in "".join(fix.code)
        assert "import__" not in str(hu.verdict(trace)).replace(evil[:30], "")
    trace.manifest["run"]["caller"] = [1]
    assert Caller.of(trace).framework == "loop"
