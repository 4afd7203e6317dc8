"""Machine code for the codecs' inner loops, made for this CPU by a short-lived process.

`load_kernels` gives the kernels, or none where they cannot be had; `p2ptrain.codecs.warm_up` checks them against the
codecs' plain code and puts them to use. Layout: `code` and `topk` say what they compute, in the words of
`emit`; `link` turns LLVM's output into plain bytes, `build` is the process that does both, `load` keeps its output and
makes it callable.

Why so, measured in a process that has torch loaded (numba 0.68, llvmlite 0.50, PSS): importing numba adds 53 MB, and
compiling its first function makes that 122 MB and takes 0.7 to 1 s; importing llvmlite, its compiler, adds 38 MB. A
peer should not carry for days what it uses for a second. So `build` runs as a process of its own (0.7 s of CPU, 95 MB,
once for each installation and CPU), and a peer copies the 21 KB that it printed into executable memory: 10 ms, 0.1 MB.
That code is position-independent and needs nothing from outside, so neither a C compiler nor a linker has to be there,
as for a C file they would; ``pip`` brings llvmlite. Vectors are written out rather than left to a compiler to find.
For int8 encode / decode / accumulate that gives 8.1 / 6.8 / 8.3 GB/s of fp32, where gcc -O3 for this CPU, side by side,
gave 7.3 / 7.0 / 7.9 from plain C, and numba 1.25 / 7.7 / 8.1 from plain loops (it did not vectorise the first). For
topk encode / decode it is 2.9 / 7.7, where numba gave 2.1 to 3.0 / 5.4 to 6.1 with a longer algorithm.

Who cannot have kernels (anything but Linux on x86-64, no llvmlite, a policy against new executable memory) computes the
same bits with torch and NumPy, more slowly.
"""

from __future__ import annotations

from p2ptrain.kernels.load import Kernel, load_kernels

__all__ = ["Kernel", "load_kernels"]
