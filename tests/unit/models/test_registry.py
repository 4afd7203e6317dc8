"""Sizes are known without torch."""

from __future__ import annotations

import subprocess
import sys


def test_sizes_need_no_torch() -> None:
    code = (
        "import sys; from p2ptrain.manifest import ModelSpec, TrainingSpec\n"
        "from p2ptrain.models import estimate_memory_bytes, num_parameters\n"
        "num_parameters(ModelSpec()), estimate_memory_bytes(ModelSpec(), TrainingSpec())\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
