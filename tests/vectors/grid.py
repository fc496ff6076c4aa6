#!/usr/bin/env python3
"""The grid of docs/arithmetic.md, section 5, in exact integers: weights, their bytes, steps, and V's scales as points of 64ths. Independent of the Rust code.

    python3 grid.py           write grid.txt beside this file
    python3 grid.py --check   compare it instead

Either way it holds the distances to rounding boundaries to those that the page states.
"""

import functools
import struct
from fractions import Fraction as F
from math import isqrt

from make import exponent, f16, f32, write_or_check


def bits(x):
    return struct.unpack("<I", struct.pack("<f", float(x)))[0]


def from_bits(b):
    return F(struct.unpack("<f", struct.pack("<I", b & 0xFFFFFFFF))[0])


GRID = 64
PRECISION = 200
TO_STEP = from_bits(0x3B808081)
INVERSES = {4: from_bits(0x3F7FED7B), 5: from_bits(0x3F4CC6EE), 6: from_bits(0x3F2A99E5), 7: from_bits(0x3F124980)}
PLACES = range(64)
# What the page promises. That of V's scales, 1.6e-6 of log2, is a factor of 2^(128 * 1.6e-6) of their 128th powers.
BYTE_MARGIN, UNITS_MARGIN, STEP_MARGIN, SCALE_MARGIN = F(67, 10) / 2**22, F(26) / 2**22, F(8, 10**4), F(142, 10**6)


@functools.cache
def mantissa(i):
    """2^(i/64) between two rationals, equal ones where it is rational: 2^200 times it is a 64th root of an integer."""
    root = 1 << (i + GRID * PRECISION)
    for _ in range(6):
        root = isqrt(root)
    low = F(root, 2**PRECISION)
    return low, low + F(1, 2**PRECISION) if i else low


def power(point):
    """2^(point/64) between two rationals."""
    low, high = mantissa(point % GRID)
    scale = F(2) ** (point // GRID)
    return low * scale, high * scale


def decided(rule, ends):
    """What a monotone rule makes of a number between the ends."""
    low, high = map(rule, ends)
    assert low == high
    return low


@functools.cache
def units(point):
    """f16 of a weight, in units of 2^-24."""
    return int(decided(f16, power(point)) * 2**24)


def up(y, n):
    return from_bits((bits(y) + 2 ** (24 - n) - 1) & ~(2 ** (24 - n) - 1))


@functools.cache
def step(largest, n):
    """The step of the largest scaled weight, of n bits, and nearly its inverse."""
    kappa = up(f32(decided(f32, power(max(largest, -3200))) * TO_STEP), n)
    e = exponent(kappa)
    return kappa, INVERSES[int(kappa / F(2) ** e * 4)] / F(2) ** e


def place(t):
    return (29 * (t % 64) + 32) % 64


def threshold(place):
    return (place + F(3, 8)) / 64


@functools.cache
def byte_at(point, inverse, place):
    return decided(lambda p: (p * inverse + threshold(place)).__floor__(), power(point))


def byte(point, inverse, t):
    w = byte_at(point, inverse, place(t))
    assert 0 <= w <= 255
    return w


@functools.cache
def scale_point(scale):
    """The integer nearest to 64*log2(scale): 2^(2v-1) < scale^128 < 2^(2v+1)."""
    e = exponent(scale**128)
    return (e + 1) // 2


# The table.


# Powers of 2^(b/64) that give bytes from 0 to 255 by the steps 4/4 to 7/4.
OCTAVES = range(-8, 8)


def sums(inverse, octave):
    """For each mantissa of the grid the sum of its bytes at all 64 places. A byte is the least of them, or one more from some place on, so that the sum tells
    all 64."""
    result = []
    for i in range(GRID):
        bytes_ = [byte_at(i + GRID * octave, inverse, p) for p in PLACES]
        assert bytes_ == sorted(bytes_) and bytes_[-1] - bytes_[0] <= 1 and bytes_[-1] <= 255
        result.append(sum(bytes_))
    return result


def relative(x, boundary):
    return abs(x / boundary - 1)


def nearest_byte():
    """The least relative change of 2^(b/64)*inv that changes a byte."""
    least = F(1)
    for m, inverse in INVERSES.items():
        for point in range(GRID * OCTAVES.start, GRID * OCTAVES.stop):
            for end in power(point):
                x = end * inverse
                # Thresholds are reached at whole numbers less (place + 3/8)/64: at (j + 5/8)/64.
                j = max(0, (64 * x - F(5, 8)).__floor__())
                for boundary in ((j + F(5, 8)) / 64, (j + 1 + F(5, 8)) / 64):
                    least = min(least, relative(boundary, x))
    return least


def nearest_units():
    """The same of f16(p), at the middles between neighbours. 2^-25 is one itself, and is left out."""
    least = F(1)
    for point in range(-384, -1700, -1):
        for p in power(point):
            quantum = F(2) ** (max(exponent(p), -14) - 10)
            middle = ((p / quantum).__floor__() + F(1, 2)) * quantum
            if point == -1600:
                assert p == middle and units(point) == 0
            else:
                least = min(least, relative(middle, p))
    return least


def nearest_step():
    """The same of a step, at numbers of 3 bits, which include those of 2."""
    least = F(1)
    for point in range(GRID):
        for p in power(point):
            y = p / 255
            quantum = F(2) ** (exponent(y) - 2)
            below = (y / quantum).__floor__() * quantum
            least = min(least, relative(below, y), relative(below + quantum, y))
    return least


def nearest_scale():
    """The same of a scale's 128th power. Every f16 is one of these times a power of two, which the rounding of its logarithm does not see."""
    least = F(1)
    for s in range(1024, 2048):
        x, v = F(s) ** 128, scale_point(F(s))
        low, high = F(2) ** (2 * v - 1), F(2) ** (2 * v + 1)
        assert low < x < high
        least = min(least, relative(x, low), relative(high, x))
    return least


def check_margins():
    for found, promised in (
        (nearest_byte(), BYTE_MARGIN),
        (nearest_units(), UNITS_MARGIN),
        (nearest_step(), STEP_MARGIN),
        (nearest_scale(), SCALE_MARGIN),
    ):
        assert promised <= found < promised * F(21, 20), (float(found), float(promised))
    for n in (2, 3):
        for largest in range(GRID):
            assert byte_at(largest, step(largest, n)[1], PLACES[-1]) <= 255


def line(name, numbers):
    return f"{name}: {' '.join(map(str, numbers))}"


def text():
    result = [line("units -384 down", [units(-384 - i) for i in range(1281)])]
    result.append(line("mantissas", [f"{bits(decided(f32, power(i))):08x}" for i in range(GRID)]))
    for n in (2, 3):
        kappas = [step(b, n) for b in range(GRID)]
        result.append(line(f"step {n}", [f"{bits(kappa):08x}" for kappa, _ in kappas]))
        result.append(line(f"inverse {n}", [f"{bits(inverse):08x}" for _, inverse in kappas]))
    for m, inverse in INVERSES.items():
        for octave in OCTAVES:
            result.append(line(f"bytes {m} {octave}", sums(inverse, octave)))
    result.append(line("scale points", [scale_point(F(s)) for s in range(1, 2048)]))
    return "\n".join(result) + "\n"


def main():
    check_margins()
    write_or_check({"grid.txt": text()})


if __name__ == "__main__":
    main()
