"""Every in-place operation that torch has, called on a small packed weight and on a plain tensor.

The operators are those whose schema writes to an argument; the functions are those whose name says that they
do. Arguments are found by trial on the plain tensor. They run in child processes, because some end theirs
when they are given what they did not expect. Run as a script: a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import halfulp as hu

GRID = "bf16"
SIDE = 4
TRIES = 200
FREED = (0x55, 0xAA, 0x33)  # bytes for memory that nobody has written
Call = Callable[[torch.Tensor], Any]


def start() -> torch.Tensor:
    """Values on the grid; products and sums of a few of them are, too."""
    return torch.tensor([0.5, -1.0, 2.0, 1.0]).repeat(SIDE, 1) * torch.tensor([[1.0], [2.0], [-1.0], [0.5]])


def packed() -> torch.nn.Linear:
    model = torch.nn.Linear(SIDE, SIDE, bias=False)
    with torch.no_grad():
        model.weight.copy_(start())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    hu.WriteBack(inner, GRID, "rne", model=model, storage="packed")
    return model


def tensors() -> list[Any]:
    return [
        lambda: torch.full((SIDE, SIDE), 2.0),
        lambda: torch.zeros(SIDE, SIDE, dtype=torch.long),
        lambda: torch.eye(SIDE) > 0,
        lambda: torch.tensor(1.0),
        lambda: torch.tensor([1, 0, 2, 3]),
        lambda: torch.ones(SIDE),
        lambda: torch.eye(SIDE).to(torch.uint8),
    ]


def values_for(kind: str) -> list[Any]:
    """What an argument of a type may be, the likeliest first."""
    kind = kind.replace("SymInt", "int")
    simple: dict[str, list[Any]] = {
        "number": [2, 0.5], "int": [0, 1, SIDE], "float": [0.5, 1.0], "bool": [False, True],
        "str": ["mean", "sum"],
        "List[int]": [[SIDE, SIDE], [0], [1]], "List[float]": [[1.0]], "List[bool]": [[True]],
        "List[number]": [[2]], "Optional[List[int]]": [None, [0]],
    }  # fmt: skip
    if kind in simple:
        return [lambda v=v: v for v in simple[kind]]
    if kind == "Tensor":
        return tensors()
    if kind in ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"):
        return [lambda make=make: [make()] for make in tensors()]
    if kind.startswith("Optional"):
        return [lambda: None]
    return []


def of_operators() -> Iterator[tuple[str, list[Call]]]:
    """Overloads that write to a tensor, with the ways to call them: the weight is each of those in turn."""
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            places = [i for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write]
            for place in places:
                yield f"aten.{name}.{overload} {op._schema.arguments[place].name}", ways(op, place)


def ways(op: Any, place: int) -> list[Call]:
    arguments = op._schema.arguments
    free = [i for i, a in enumerate(arguments) if i != place and not a.has_default_value()]
    choices = [values_for(str(arguments[i].type)) for i in free]
    listed = str(arguments[place].type).startswith("List")

    def call(chosen: tuple[Any, ...]) -> Call:
        def run(w: torch.Tensor) -> Any:
            given = {arguments[i].name: make() for i, make in zip(free, chosen, strict=True)}
            given[arguments[place].name] = [w] if listed else w
            plain = [a.name for a in arguments if not a.kwarg_only and a.name in given]
            cut = next((i for i, a in enumerate(arguments) if a.name not in given), len(arguments))
            first = [a.name for a in arguments[:cut] if a.name in plain]
            return op(*(given[n] for n in first), **{n: v for n, v in given.items() if n not in first})

        return run

    return [call(chosen) for chosen in itertools.islice(itertools.product(*choices), TRIES)]


def of_functions() -> Iterator[tuple[str, list[Call]]]:
    """Methods, functions and initialisers by name, on the weight and on what shares its values."""
    given: list[tuple[Any, ...]] = [
        (), (2,), (0.5,), (0.25, 2.0), (0, 1), ([SIDE, SIDE],), *((t(),) for t in tensors()),
        (0, torch.tensor([1, 0]), 2.0), (0, torch.tensor([1, 0]), torch.full((2, SIDE), 2.0)),
        (torch.eye(SIDE) > 0, 2.0), (torch.eye(SIDE) > 0, torch.ones(SIDE, SIDE)),
        (0, torch.zeros(SIDE, SIDE, dtype=torch.long), torch.ones(SIDE, SIDE)),
        (torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)), (lambda x: x * 2,),
        (torch.tensor([0]), torch.full((SIDE,), 2.0)), (torch.ones(SIDE, SIDE), lambda x, y: x + y),
        (2, 0, 1.0), ((torch.tensor([0]),), torch.ones(SIDE)), (0, 0, 1.0), (2, -1, 1.0),
    ]  # fmt: skip
    views: dict[str, Call] = {
        "w": lambda w: w, "w.data": lambda w: w.data, "w.detach()": lambda w: w.detach(),
        "w[1]": lambda w: w.detach()[1], "w.T": lambda w: w.detach().T,
        "w.view(-1)": lambda w: w.detach().view(-1),
    }  # fmt: skip

    def called(f: Callable[..., Any], view: Call, args: tuple[Any, ...]) -> Call:
        return lambda w: f(view(w), *args)

    functional = vars(torch.nn.functional)
    methods = [n for n in dir(torch.Tensor) if n.endswith("_") and not n.endswith("__")]
    operators = ["__setitem__", *(n for n in dir(torch.Tensor) if n.startswith("__i") and n.endswith("__"))]
    for name in (*methods, *operators):
        if callable(getattr(torch.Tensor, name)) and name not in ("__init_subclass__", "__init__"):
            for shown, view in views.items():
                yield f"{shown}.{name}", [called(by_name(name), view, args) for args in given]
    for where in (torch, torch.nn.init, torch.nn.functional):
        for name in (n for n in dir(where) if n.endswith("_") and not n.startswith("__")):
            f = getattr(where, name)
            if callable(f):
                first = in_a_list(f) if "foreach" in name else f
                for shown in ("w", "w.data"):
                    yield f"{where.__name__}.{name} {shown}", [called(first, views[shown], a) for a in given]
    for name, f in functional.items():
        if inspect.isfunction(f) and "inplace" in inspect.signature(f).parameters:
            yield f"F.{name}(inplace=True)", [called(partial(f, inplace=True), views["w"], a) for a in given]


def by_name(name: str) -> Callable[..., Any]:
    return lambda x, *args: getattr(x, name)(*args)


def in_a_list(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args: f([x], *args)


def judged(call: Call) -> str | None:
    """``same``, ``refused`` or what is wrong; None where plain torch cannot be called so, or leaves what was
    in the memory before."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain, *others = (on_plain(call, freed) for freed in FREED)
        except Exception:
            return None
        if any(str(plain.tolist()) != str(x.tolist()) for x in others):
            return None
        model = packed()
        said = None
        try:
            torch.manual_seed(0)
            call(model.weight)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        now = model.state_dict()["weight"]
    if not torch.isfinite(now).all():
        return "not finite"
    if said is not None:
        return (
            "refused" if torch.equal(now, start()) else f"refused, but changed: {said.splitlines()[0][:200]}"
        )
    if plain.shape != now.shape or not torch.equal(now, plain.to(now.dtype)):
        return "unchanged" if torch.equal(now, start()) else "other values"
    return "same" if not torch.equal(now, start()) else "same, unchanged"


def on_plain(call: Call, freed: int) -> torch.Tensor:
    """What the call leaves in a plain tensor, where memory that nobody has written holds this byte: some
    operators read such memory when their arguments do not fit together."""
    x = start()
    torch.manual_seed(0)
    fill_of_memory(freed)
    try:
        call(x)
    finally:
        fill_of_memory(0)
    return x


def fill_of_memory(byte: int) -> None:
    with contextlib.suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).mallopt(-6, byte)  # M_PERTURB


def verdict_of(calls: list[Call]) -> str:
    """Of the first way that plain torch takes and that changes something, else of the last that it takes."""
    verdict = "not callable"
    for call in calls:
        found = judged(call)
        if found is not None:
            verdict = found
            if found != "same, unchanged":
                break
    return verdict


def in_children(operations: list[tuple[str, list[Call]]]) -> Iterator[tuple[str, str]]:
    """Verdicts by name; where one ends its process, another goes on after it."""
    done = 0
    while done < len(operations):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(2)
            for _, calls in operations[done:]:
                os.write(writer, f"{verdict_of(calls)}\n".encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            for line in pipe:
                yield operations[done][0], line.strip()
                done += 1
        os.waitpid(child, 0)
        if done < len(operations):
            name, calls = operations[done]
            yield name, "ends the process, as with a plain tensor" if crashes(calls) else "ends the process"
            done += 1


def crashes(calls: list[Call]) -> bool:
    """Whether plain torch ends the process, too."""
    child = os.fork()
    if child == 0:
        os.close(2)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in calls:
                for freed in FREED:
                    with contextlib.suppress(Exception):
                        on_plain(call, freed)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return status != 0


def main(which: str) -> None:
    torch.set_num_threads(1)
    packed()  # compiles kernels once, before there are children
    operations = {"operators": of_operators, "functions": of_functions}[which]()
    for name, verdict in in_children(list(operations)):
        print(json.dumps([name, verdict]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
