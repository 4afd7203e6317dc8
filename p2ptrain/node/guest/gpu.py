"""A GPU as a guest uses it: a limit on its memory, and its temperature, which torch reads by NVML (nvidia-ml-py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from p2ptrain.errors import ConfigError, ResourceError

COOLER_CELSIUS = 10.0
"""Degrees below the limit to which the GPU has to cool before the peer goes on."""
UNREADABLE = "the GPU's temperature cannot be read"


def limit_memory(device: torch.device, limit: int) -> None:
    """Limit torch to ``limit`` bytes of a GPU in this process; on a CPU, or for a limit of 0, do nothing.

    The driver's own memory for the process, of some hundred MB, is not counted.
    """
    if device.type == "cuda" and limit:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


@contextlib.contextmanager
def fitting_gpu() -> Iterator[None]:
    """Raise `ResourceError`, with what to do, if the GPU's memory does not suffice for the block."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ResourceError(
            f"the model and its batches do not fit into the GPU's memory, of which --max-gpu-memory may leave a part:"
            f" raise that, close other programs that use the GPU, or train with --device cpu ({error})"
        ) from error


def celsius(device: torch.device) -> float:
    """Return a GPU's temperature.

    Raises:
        ConfigError: nvidia-ml-py is not installed.
        ResourceError: The driver does not tell it.
    """
    try:
        import pynvml
    except ImportError as error:
        raise ConfigError(
            "guest.gpu_celsius needs nvidia-ml-py: install p2ptrain[gpu], or leave the limit out"
        ) from error
    try:
        return float(torch.cuda.temperature(device))
    except (pynvml.NVMLError, RuntimeError) as error:
        raise ResourceError(f"{UNREADABLE} ({error}): update the driver, or leave guest.gpu_celsius out") from error


class Heat:
    """A GPU's temperature against a limit."""

    def __init__(self, limit: float, read: Callable[[], float]) -> None:
        """``read`` returns the temperature in degrees Celsius, as `celsius`; its errors at the first look propagate."""
        self._limit = limit
        self._read = read
        self._has_read = False

    def look(self, counts: bool) -> str:
        """Return the reason if the GPU is too hot or cannot be read; it has to cool more if the reason ``counts``."""
        try:
            now = self._read()
        except ResourceError:
            if not self._has_read:
                raise
            return UNREADABLE
        self._has_read = True
        limit = self._limit - (COOLER_CELSIUS if counts else 0.0)
        return f"the GPU has more than {self._limit:.0f} °C" if now > limit else ""
