"""Put the libraries of `p2ptrain/native` into the wheel; without a compiler the wheel is one of Python alone."""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "p2ptrain/native"


class NativeLibraryHook(BuildHookInterface):
    """Compiles before the wheel is packed. An editable installation builds them on first use instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the libraries to the wheel with the tag of this platform."""
        self._folder = tempfile.TemporaryDirectory(prefix="p2ptrain-build-")
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("p2ptrain_native_build", Path(self.root, NATIVE, "build.py"))
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            libraries = build.write_libraries(Path(self._folder.name))
        except build.BuildError as error:
            self.app.display_warning(f"built without native libraries, which torch replaces more slowly: {error}")
            return
        build_data["force_include"] |= {str(path): f"{NATIVE}/{path.name}" for path in libraries}
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled file."""
        self._folder.cleanup()
