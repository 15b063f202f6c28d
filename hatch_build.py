"""The build of the package: the library of the CPU kernels, compiled into the wheel."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/halfulp/kernels/native")


def _builder(root: str) -> Any:
    spec = importlib.util.spec_from_file_location("halfulp_native_build", Path(root) / NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeBuild(BuildHookInterface):
    """Compile the kernels; without a compiler the wheel has none, and the NumPy reference serves."""

    def dependencies(self) -> list[str]:
        """Ask for a compiler where the machine has none."""
        return [] if _builder(self.root).compiler() else ["ziglang>=0.15"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the sources, where an editable install finds it, and put it into a wheel.

        Both builds share what is compiled: objects are named by their content.
        """
        if self.target_name != "wheel":
            return
        try:
            library = _builder(self.root).build(Path(self.root) / NATIVE / "built")
        except OSError as error:
            self.app.display_warning(f"halfulp is built without its CPU kernels: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"halfulp/kernels/native/built/{library.name}"
