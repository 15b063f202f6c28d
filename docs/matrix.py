"""The table of optimizers in ``optimizers.md``: each is stepped, audited and wrapped with every policy, here.

    python docs/matrix.py            what the installed libraries give, as the page has it
    python docs/matrix.py --write    put it into the page

A cell is what happened: *yes*, or the reason for which halfulp or the optimizer itself refused. *yes* under
"audit" means that the audited run ended in the same bits as the run that nobody looked at, and that the
recorded counts are those of a comparison of the bits before and after every step. *yes* under a policy means
that every managed weight was on the grid and finite after every step, and that some of them had moved. *yes*
under "states": the run was the same again, and what is recorded of moments is what a comparison gives.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import halfulp as hu

PAGE = Path(__file__).parent / "optimizers.md"
POLICIES = ("rne", "sr", "deadzone-sr", "eco", "kahan", "master")
STEPS = 4
Make = Callable[[Any, Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: list[tuple[str, str, str, Make]] = [
    ("torch", "torch", "AdamW", lambda m, p: m.optim.AdamW(p, lr=1e-3)),
    ("torch", "torch", "AdamW, fused", lambda m, p: m.optim.AdamW(p, lr=1e-3, fused=True)),
    ("torch", "torch", "SGD with momentum", lambda m, p: m.optim.SGD(p, lr=1e-2, momentum=0.9)),
    ("torch", "torch", "Adafactor", lambda m, p: m.optim.Adafactor(p, lr=1e-2)),
    ("torch", "torch", "Muon", lambda m, p: m.optim.Muon(p, lr=1e-3)),
    ("torchao", "torchao.optim", "AdamW8bit", lambda m, p: m.AdamW8bit(p, lr=1e-3)),
    ("torchao", "torchao.optim", "AdamW4bit", lambda m, p: m.AdamW4bit(p, lr=1e-3)),
    ("torchao", "torchao.optim", "AdamWFp8", lambda m, p: m.AdamWFp8(p, lr=1e-3)),
    ("torchao", "torchao.optim", "_AdamW, bf16 stochastic",
     lambda m, p: m._AdamW(p, lr=1e-3, bf16_stochastic_round=True)),
    ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", lambda m, p: m.AdamW8bit(p, lr=1e-3)),
    ("bitsandbytes", "bitsandbytes.optim", "Lion8bit", lambda m, p: m.Lion8bit(p, lr=1e-3)),
    ("heavyball", "heavyball", "AdamW", lambda m, p: m.AdamW(p, lr=1e-3)),
    ("heavyball", "heavyball", "SOAP", lambda m, p: m.SOAP(p, lr=1e-3)),
    ("heavyball", "heavyball", "Muon", lambda m, p: m.Muon(p, lr=1e-3)),
    ("torch-optimi", "optimi", "AdamW, Kahan", lambda m, p: m.AdamW(p, lr=1e-3, kahan_sum=True)),
    ("torch-optimi", "optimi", "Lion", lambda m, p: m.Lion(p, lr=1e-3)),
    ("prodigyopt", "prodigyopt", "Prodigy", lambda m, p: m.Prodigy(p, lr=1.0, d0=1e-3)),
    ("schedulefree", "schedulefree", "AdamWScheduleFree", lambda m, p: m.AdamWScheduleFree(p, lr=1e-3)),
    ("pytorch-optimizer", "pytorch_optimizer", "SOAP", lambda m, p: m.SOAP(p, lr=1e-3)),
    ("pytorch-optimizer", "pytorch_optimizer", "Lion", lambda m, p: m.Lion(p, lr=1e-3)),
    ("pytorch-optimizer", "pytorch_optimizer", "AdaFactor", lambda m, p: m.AdaFactor(p, lr=1e-2)),
    ("pytorch-optimizer", "pytorch_optimizer", "Muon",
     lambda m, p: m.Muon([{"params": list(p), "use_muon": True}], lr=1e-3)),
]  # fmt: skip
"""The package, the module, the name in the table, and how it is made."""


def model_and_optimizer(module: Any, make: Make) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A bfloat16 model with matrices alone: some of these optimizers take nothing else."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1]).bfloat16()
    optimizer = make(module, model.parameters())
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # schedule-free ones
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seen: Callable[[], None]) -> None:
    for i in range(STEPS):
        torch.manual_seed(i)
        x = torch.randn(16, 64, dtype=torch.bfloat16)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        seen()


def bits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().view(torch.int16).reshape(-1) for p in model.parameters()]).clone()


def audited(module: Any, make: Make) -> str:
    """Whether an audit leaves the run alone and counts what a comparison of bits counts."""
    model, optimizer = model_and_optimizer(module, make)
    stages = [bits(model)]
    train(model, optimizer, lambda: stages.append(bits(model)))
    model, optimizer = model_and_optimizer(module, make)
    memory = hu.Memory()
    with hu.Audit(optimizer, ["bf16"], model=model, out=memory):
        train(model, optimizer, lambda: None)
    if not torch.equal(bits(model), stages[-1]):
        return "the audited run differs"
    expected = [float((a == b).double().mean()) for a, b in pairwise(stages)]
    return "yes" if memory.trace.frozen("bf16", of="weights").tolist() == expected else "the counts differ"


def states(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """All float tensors of the state as they are, by kind and weight, however deep they are kept."""
    found = {}
    for name, p in model.named_parameters():
        left = list(optimizer.state[p].items())
        while left:
            kind, x = left.pop()
            if isinstance(x, dict):
                left += x.items()
            elif type(x) is torch.Tensor and x.is_floating_point() and x.numel() > 1:
                found[str(kind), name] = x.detach().clone()
    return found


def followed(module: Any, make: Make) -> str:
    """Whether an audit with states leaves the run alone and counts what happens to moments."""
    model, optimizer = model_and_optimizer(module, make)
    stages: list[dict[tuple[str, str], torch.Tensor]] = []
    train(model, optimizer, lambda: stages.append(states(optimizer, model)))
    expected, memory = bits(model), hu.Memory()
    model, optimizer = model_and_optimizer(module, make)
    with hu.Audit(optimizer, ["bf16"], model=model, out=memory, states=True):
        train(model, optimizer, lambda: None)
    if not torch.equal(bits(model), expected):
        return "the audited run differs"
    if not memory.trace.roles:
        coded = "Not followed" in str(hu.verdict(memory.trace))
        return "codes with scales, no values" if coded else "nothing was found"
    for role, trace in memory.trace.roles.items():
        for name in (t["name"] for t in trace.tensors):
            kept = [(a[role, name], b[role, name]) for a, b in pairwise(stages)]
            lost = [(_bf16(_bf16(a) + (b - a)) == _bf16(a)).double().mean().item() for a, b in kept]
            if trace.frozen("bf16", name, of="weights").tolist() != lost:
                return f"the counts of {role} differ"
    return "yes"


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def wrapped(module: Any, make: Make, policy: str) -> str:
    """Whether a policy keeps weights on the grid, and moves some."""
    model, optimizer = model_and_optimizer(module, make)
    begin = bits(model)
    opt = hu.WriteBack(optimizer, "e4m3@128", policy, model=model, seed=0)
    grid = hu.grid("e4m3@128")
    trouble: list[str] = []

    def look() -> None:
        for p in model.parameters():
            if not bool(torch.isfinite(p).all()):
                trouble.append("not finite")
            elif not torch.equal(grid.round(p.detach().float()), p.detach().float()):
                trouble.append("left the grid")

    train(model, opt, look)
    if trouble:
        return trouble[0]
    return "yes" if int((bits(model) != begin).sum()) else "nothing moved"


def outcome(what: Callable[..., str], *args: Any) -> str:
    """What happened, in one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's libraries
            return what(*args)
    except hu.HalfulpError as error:
        return "refused: " + re.sub(r" of [A-Z_]\w+ through", " through", _first(str(error)))
    except Exception as error:
        return f"the optimizer itself failed: {type(error).__name__}: {_first(str(error))}"


def _first(text: str) -> str:
    line = text.strip().split("\n")[0]
    found = re.match(r"(.+?[a-z)'])[.:](\s|$)", line)
    return (found[1] if found else line)[:160]


def rows() -> dict[str, tuple[str, ...]]:
    """One row an optimizer whose library is installed: audit, states, then every policy."""
    torch.compile = _as_written  # type: ignore[assignment]  # put back below
    try:
        return _rows()
    finally:
        torch.compile = _compile


_compile = torch.compile


def _as_written(function: Any = None, **_: Any) -> Any:
    """What they compile is run as it is written: the numbers are theirs, and it takes seconds."""
    return (lambda f: f) if function is None else function


def _rows() -> dict[str, tuple[str, ...]]:
    found = {}
    for package, name, label, make in OPTIMIZERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except ImportError:
            continue
        cells = [outcome(audited, module, make), outcome(followed, module, make)]
        cells += [outcome(wrapped, module, make, policy) for policy in POLICIES]
        found[f"{package} {label}"] = tuple(cells)
    return found


def table(found: dict[str, tuple[str, ...]]) -> str:
    """The table, and under it the reasons that it numbers."""
    reasons: list[str] = []
    lines = ["| optimizer | audit | states | " + " | ".join(f"`{p}`" for p in POLICIES) + " |"]
    lines.append("|---" * (len(POLICIES) + 3) + "|")
    for label, cells in found.items():
        said = []
        for cell in cells:
            if cell == "yes":
                said.append("yes")
                continue
            if cell not in reasons:
                reasons.append(cell)
            said.append(f"no ({reasons.index(cell) + 1})")
        lines.append(f"| {label} | " + " | ".join(said) + " |")
    plain = [re.sub(r"([|<>*_`])", r"\\\1", reason) for reason in reasons]
    return "\n".join([*lines, "", *(f"{i}. {reason}" for i, reason in enumerate(plain, 1))])


def versions() -> str:
    packages = dict.fromkeys(p for p, *_ in OPTIMIZERS)
    return ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages if p != "torch")


BEGIN, END = "<!-- made by matrix.py -->\n", "\n<!-- end -->"


def main() -> None:
    made = table(rows())
    if "--write" in sys.argv:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n\n{versions()}.\n{END}{after}")
    print(made)


if __name__ == "__main__":
    main()
