"""The kernels of serving on a GPU, beside torch: in its context, on its memory, and in a stream of their own."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import torch

from p2ptrain.native.cuda import CudaError, CudaProgram
from p2ptrain.native.exact import Batch

logger = logging.getLogger(__name__)


class GpuKernels:
    """The kernels on one GPU; raises `CudaError` as `CudaProgram`.

    Attributes:
        stream: Of all that serving does on the GPU; training's own work gives way to it.
    """

    build = "CUDA"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._program = CudaProgram(device.index or 0)

    def run(self, program: int, batch: Batch, helpers: ThreadPoolExecutor | None = None) -> None:
        """Launch the program at an address of the GPU; it has run when the stream is done."""
        self._program.launch(program, batch, self.stream.cuda_stream)


@functools.cache
def load_gpu_kernels(device: torch.device) -> GpuKernels | None:
    """Return the kernels on a GPU; None, with a warning, if they cannot be used there.

    It compiles for some seconds: call it off the event loop.
    """
    try:
        return GpuKernels(device)
    except CudaError as error:
        logger.warning("serving computes on the CPU, not on %s: %s", device, error)
        return None
