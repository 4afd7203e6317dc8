"""The codecs' inner loops in C: a shared library without Python headers, called by ctypes, which releases the GIL.

`codecs.c` documents each function. `build` compiles it; `load` finds or builds a library. `p2ptrain.codecs.warm_up`
verifies the functions against the plain code. A machine without a library computes the same bits with torch and NumPy,
more slowly.
"""
