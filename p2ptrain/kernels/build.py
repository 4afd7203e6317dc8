"""The process that makes the kernels: ``python -m p2ptrain.kernels.build`` prints an image for `load.unpack`.

It imports no torch, and runs every kernel once, so that one that this CPU does not understand ends this process and
no peer.
"""

from __future__ import annotations

import logging
import sys

import llvmlite.binding as llvm

from p2ptrain.kernels.code import kernels
from p2ptrain.kernels.emit import module_of
from p2ptrain.kernels.link import ALIGNMENT, LinkError, link
from p2ptrain.kernels.load import pack, unpack

logger = logging.getLogger(__name__)

SAMPLE_BLOCKS = 2


def target_machine(cpu: str | None = None) -> llvm.TargetMachine:
    """LLVM's idea of this CPU with all that it can do, or of the CPU with this name."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten() if cpu is None else ""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu or llvm.get_host_cpu_name(), features=features, opt=3, reloc="pic", codemodel="small"
    )


def build_image(machine: llvm.TargetMachine) -> bytes:
    """Compile and link all kernels, leaving out those for which the CPU lacks instructions."""
    code, offsets = bytearray(), {}
    for name, kernel in kernels().items():
        module = llvm.parse_assembly(module_of(name, kernel))
        module.verify()
        try:
            linked = link(machine.emit_object(module), name)
        except LinkError as error:
            logger.warning("without a kernel %s: %s", name, error)
            continue
        code += bytes(-len(code) % ALIGNMENT)
        offsets[name] = len(code)
        code += linked
    return pack(offsets, bytes(code))


def try_all(image: bytes) -> None:
    """Run every kernel of the image on zeros."""
    sizes = kernels()
    for name, kernel in unpack(image).items():
        source = bytearray(SAMPLE_BLOCKS * sizes[name].source_bytes)
        target = bytearray(SAMPLE_BLOCKS * sizes[name].target_bytes)
        kernel(source, target, SAMPLE_BLOCKS, 1.0)


def main() -> None:
    """Write an image that was tried to standard output."""
    image = build_image(target_machine())
    try_all(image)
    sys.stdout.buffer.write(image)


if __name__ == "__main__":
    main()
