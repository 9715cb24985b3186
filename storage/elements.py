"""The values of stored elements of any type as float64, without torch: for comparing, never for training.

numpy knows neither bfloat16 nor the 8-bit floats; the former is a float32 cut short, the latter are looked up.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.frames import itemsize_of

__all__ = ["float_values"]

Values = NDArray[np.float64] | NDArray[np.complex128]

# exponent bits, mantissa bits, bias, and what the top exponent means
_EIGHT_BITS = {
    "float8_e4m3fn": (4, 3, 7, "nan at all ones"),
    "float8_e4m3fnuz": (4, 3, 8, "nan at minus zero"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "nan at minus zero"),
}


def float_values(raw: bytes | memoryview, dtype: str) -> Values:
    """``raw`` little-endian elements of torch's ``dtype``. Integers beyond 2**53 are rounded."""
    flat = np.frombuffer(raw, dtype=np.uint8)
    itemsize_of(dtype)  # an unknown type is refused by name
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):  # a signalling NaN may be stored; here it is a NaN like any other
            return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float8_e8m0fnu":
        return _e8m0_table()[flat]
    if dtype in _EIGHT_BITS:
        return _eight_bit_table(dtype)[flat]
    if dtype == "complex32":
        return flat.view("<f2").astype(np.float64).view(np.complex128)
    values: NDArray[Any] = flat.view(np.dtype(dtype).newbyteorder("<"))
    if dtype.startswith("complex"):
        return values.astype(np.complex128)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


@cache
def _eight_bit_table(dtype: str) -> NDArray[np.float64]:
    exponent_bits, mantissa_bits, bias, top = _EIGHT_BITS[dtype]
    table = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = 2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        table[code] = sign * value
        if top == "nan at all ones" and code & 0x7F == 0x7F:
            table[code] = np.nan
        if top == "nan at minus zero" and code == 0x80:
            table[code] = np.nan
        if top == "ieee" and exponent == (1 << exponent_bits) - 1:
            table[code] = sign * np.inf if mantissa == 0 else np.nan
    return table


@cache
def _e8m0_table() -> NDArray[np.float64]:
    table = np.exp2(np.arange(256, dtype=np.float64) - 127.0)
    table[255] = np.nan
    return table
