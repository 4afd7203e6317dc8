"""The codecs' inner loops in C: a shared library without Python's headers, called with ctypes, which releases the GIL.

`codecs.c` says what each function computes. `build` compiles it; `load` finds a library that fits, or has one built.
`p2ptrain.codecs.warm_up` checks its functions against the codecs' plain code and puts them to use. A machine without a
library computes the same bits with torch and NumPy, more slowly.
"""

from __future__ import annotations

from p2ptrain.native.load import Function, load_functions, load_library

__all__ = ["Function", "load_functions", "load_library"]
