"""Elementary functions in double precision with equal bits on all machines.

Each is a fixed sequence of single IEEE operations, which NumPy neither fuses nor reorders. NumPy's own exp, log, sin
and cos differ between CPUs in the last bit. Errors stay below ``1e-15``, relative, or absolute for sine and cosine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 in two parts, of which the first has trailing zero bits: its product with an integer is exact."""
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
"""Pi / 2 in three parts, likewise (fdlibm's ``pio2_1`` to ``pio2_3``)."""
_EXP = tuple(1.0 / value for value in (
    6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1,
))  # fmt: skip
"""Taylor coefficients, from 1 / 13! down."""
_LOG = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
    2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01,
)  # fmt: skip
_SIN = (
    1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
    8.33333333332248946124e-03, -1.66666666666666324348e-01,
)  # fmt: skip
_COS = (
    -1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
    -1.38888888888741095749e-03, 4.16666666666666019037e-02,
)  # fmt: skip
"""fdlibm's minimax coefficients of log, sine and cosine."""


def exp(values: Doubles) -> Doubles:
    """``e ** x`` for ``x <= 700``; 0 below -700."""
    clamped = np.maximum(values, -700.0)
    number = np.rint(clamped * 1.44269504088896338700)
    rest = (clamped - number * _LN2_HIGH) - number * _LN2_LOW
    powers = ((number.astype(np.int64) + 1023) << 52).view(np.float64)
    return np.where(values < -700.0, 0.0, _polynomial(rest, _EXP) * powers)


def log(values: Doubles) -> Doubles:
    """Return the natural logarithm of positive normal numbers."""
    bits = values.view(np.int64)
    exponent = ((bits - 0x3FE6A09E667F3BCD) >> 52).astype(np.int64)  # so that the mantissa lies around 1
    mantissa = (bits - (exponent << 52)).view(np.float64)
    number, f = exponent.astype(np.float64), mantissa - 1.0
    s = f / (2.0 + f)
    square = s * s
    half = 0.5 * f * f
    tail = s * (half + square * _polynomial(square, _LOG)) + number * _LN2_LOW
    return number * _LN2_HIGH + ((tail - half) + f)


def sine_cosine(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Return sines and cosines of ``0 <= x < 2 ** 20``."""
    number = np.rint(angles * 6.36619772367581382433e-01)
    rest = angles
    for part in _HALF_PI:
        rest = rest - number * part
    square = rest * rest
    sine = rest + rest * square * _polynomial(square, _SIN)
    cosine = (1.0 - 0.5 * square) + square * square * _polynomial(square, _COS)
    quadrant = number.astype(np.int64) & 3
    swapped = (quadrant & 1).astype(bool)
    found_sine, found_cosine = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    return (
        np.where(quadrant >= 2, -found_sine, found_sine),
        np.where((quadrant == 1) | (quadrant == 2), -found_cosine, found_cosine),
    )


def _polynomial(x: Doubles, coefficients: tuple[float, ...]) -> Doubles:
    """Evaluate by Horner's rule, the highest power's coefficient first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result
