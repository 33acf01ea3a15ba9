"""Products in fp8 by hand, in NumPy: what those of both runtimes are held against. Nothing here is a runtime's."""

import ml_dtypes
import numpy as np

FORWARD, GRADIENT = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {FORWARD: 448.0, GRADIENT: 57344.0}


def scale_of(values: np.ndarray, dtype: type) -> float:
    """The largest power of two by which no entry leaves the range of the dtype, at least as if an entry were 1e-12."""
    largest = max(float(np.abs(values).max(initial=0.0)), float(np.float32(1e-12)))
    exponent = 200
    while 2.0**exponent > float(np.float32(LARGEST[dtype]) / np.float32(largest)):
        exponent -= 1
    return 2.0**exponent


def narrow(values: np.ndarray, dtype: type) -> np.ndarray:
    """The values as they are after the cast, in float64."""
    scale = scale_of(values, dtype)
    return (values * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left · rightᵀ of values that are narrow already, rounded to bf16."""
    return (left @ right.T).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def linear(rows: np.ndarray, weight: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """rows [n, in] · weightᵀ [in, out], and the gradients of both for a gradient [n, out]; all of bf16 values."""
    x, w, g = narrow(rows, FORWARD), narrow(weight, FORWARD), narrow(gradient, GRADIENT)
    return product(x, w), product(g, w.T), product(g.T, x.T)
