"""A weight without memory: whatever would take its address raises."""

from __future__ import annotations

import subprocess
import sys

MEMORY = """
import os, sys, warnings
import torch
import halfulp as hu

model = torch.nn.Sequential(torch.nn.Linear(16, 16))
hu.native(model)
w = model[0].weight
ones = torch.ones(16, 16)
given = [(), (0,), (w.detach(),), (lambda x: x,), (ones, lambda x, y: x), (w, w, lambda x, y, z: x)]
calls = {
    "share": model.share_memory,
    "from_dlpack": lambda: torch.from_dlpack(w.detach()).sum(),
    "to_dlpack": lambda: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w.detach())).sum(),
    "set_": lambda: torch.ones(1).set_(w.untyped_storage()).sum(),
    "storage.float": lambda: w.untyped_storage().float(),
    "storage.share": lambda: w.untyped_storage().share_memory_(),
}
calls |= {
    f"{name} {i}": (lambda name=name, x=x, args=args: getattr(x, name)(*args))
    for name in dir(torch.Tensor)
    if callable(getattr(torch.Tensor, name, None))
    and name not in ("__init_subclass__", "__new__", "__class__")
    for i, (x, args) in enumerate((x, args) for x in (w, w.detach()) for args in given)
}
todo = list(calls.items())
while todo:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        os.close(2)
        for name, call in todo:
            try:
                said = f"gave {type(call()).__name__}"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}".splitlines()[0]
            os.write(writer, (name + "|" + said + "\\n").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        for line in pipe:
            print(line, end="")
            todo.pop(0)
    os.waitpid(child, 0)
    if todo:
        print(todo.pop(0)[0] + "|ENDED")
"""


def test_no_method_of_tensors_ends_the_process() -> None:
    """Called in a child process: whatever takes the address of a weight that has no memory raises."""
    ran = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = dict(line.split("|", 1) for line in ran.stdout.splitlines() if "|" in line)
    assert [name for name, said in found.items() if said == "ENDED"] == []
    assert len(found) > 5000
    for name in (
        "share",
        "from_dlpack",
        "share_memory_ 0",
        "apply_ 9",
        "numpy 6",
        "storage 0",
        "tolist 0",
        "map_ 10",
    ):
        assert found[name].startswith("UsageError: "), (name, found[name])
        assert "this weight has none" in found[name]
    for name in ("to_dlpack", "set_", "storage.share"):
        assert found[name].split(":")[0] in ("RuntimeError", "NotImplementedError"), (name, found[name])
    assert found["data_ptr 0"] == "gave int"
