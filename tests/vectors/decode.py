#!/usr/bin/env python3
"""Golden results of decode: the integer arithmetic of docs/arithmetic.md in exact rationals, independent of the Rust code.

    python3 decode.py           write decode.txt beside this file
    python3 decode.py --check   compare it instead

Section numbers are those of the page. Every `f32(...)` is one rounding; numbers are rationals, so a sign of zero is lost: no result here is zero but +0, where no token is seen or
V has zeros.
"""

import copy
from fractions import Fraction as F
from functools import cache
from math import isqrt

from grid import bits, byte, from_bits, scale_point, step, units
from make import clamp, f32, rhe, to_f16, token, value, write_or_check

TILE, SEGMENT, SPAN = 64, 4, 4
SMALLEST = F(2) ** -126
BASE = 196608


@cache
def pow2(n):
    return F(2) ** n


LOG2_E, LN_2 = from_bits(0x3FB8AA3B), from_bits(0x3F317218)
EXP2F = [from_bits(b) for b in (0x3AADFE47, 0x3C1E7726, 0x3D635B15, 0x3E75FCD9, 0x3F317216)] + [F(1)]
LOG2 = [
    from_bits(b)
    for b in (0x3E090EF7, 0xBE607D7C, 0x3E5F6D97, 0xBE72988E, 0x3E931B3E, 0xBEB8BC98, 0x3EF63E7D, 0xBF38AA18, 0x3FB8AA36)
]


def polynomial(r, coefficients):
    y = coefficients[0]
    for c in coefficients[1:]:
        y = f32(f32(y * r) + c)
    return y


def exp2f(x):  # section 8
    t = f32(x + 12582912)
    n = f32(t - 12582912)
    return from_bits(bits(polynomial(f32(x - n), EXP2F)) + (bits(t) << 23))


def rcp(x):  # section 7
    y = from_bits(0x7EF311C7 - bits(x))
    for _ in range(4):
        y = f32(y * f32(2 - f32(x * y)))
    return y


def log_sum_exp(m, l):  # section 7
    i = bits(l) - 0x3F3504F3
    k, u = i >> 23, f32(from_bits((i & 0x7FFFFF) + 0x3F3504F3) - 1)
    y = LOG2[0]
    for c in LOG2[1:]:
        y = f32(f32(y * u) + c)
    return f32(f32(f32(m + k) + f32(y * u)) * LN_2)


def ftz(x):
    return x if abs(x) >= SMALLEST else F(0)


def normal(x):
    """A number that `ftz` leaves alone: else a zero could be negative."""
    assert x == ftz(x)
    return x


def block_of(dim):
    """Section 2: the largest power of two that divides a row."""
    return dim & -dim


def hadamard(x, block, flush=lambda y: y):  # section 2
    x = list(x)
    for first in range(0, len(x), block):
        stride = 1
        while stride < block:
            for i in range(first, first + block):
                if not (i - first) & stride:
                    a, b = x[i], x[i + stride]
                    x[i], x[i + stride] = flush(f32(a + b)), flush(f32(a - b))
            stride *= 2
    return x


def halvings(block):
    return block.bit_length() - 1


def rotate_stored(x):
    block = block_of(len(x))
    return [v * pow2(-(halvings(block) // 2)) for v in hadamard(x, block)]


def rotate_back(x, block, flush=lambda y: y):
    return [flush(v * pow2(-(-(-halvings(block) // 2)))) for v in hadamard(x, block, flush)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def centred(scale, shift):
    return f32(shift + 8 * scale)


def half_steps(x):
    """8-bit codes of one group of a rotated row, and its scale."""
    scale = to_f16(max(abs(v) for v in x) / 16)
    return [clamp((v * 8 / scale).__floor__() + 128, 0, 255) if scale else 128 for v in x], scale


def factor_of_v(case, t):
    """What a case multiplies V's row of token t by."""
    first, end = case["v_zero"] or (0, 0)
    if first <= t < end:
        return 0
    of_tile, of_token = case["v_halvings"] or (0, 0)
    return pow2(-(of_tile * (t // TILE % 2) + of_token * (t % 4)))


def bias_of_k(bias, d):
    """What a case with this bias adds to dim d of every row of K."""
    return F((d * 29 + 3) % 17 - 8, 8) * bias


@cache
def row(side, t, dim, factor, bias, rotated):
    """A row of K or V as it comes to its centre or its quantizer."""
    x = [value(side, 0, t, d) * factor for d in range(dim)]
    if bias:
        x = [f32(v + bias_of_k(bias, d)) for d, v in enumerate(x)]
    # Larger inputs are refused.
    return rotate_stored([min(v, pow2(100)) for v in x]) if rotated else x


def to_bf16(x):
    """Section 12: at most 2^50, 8 significant bits, half to even."""
    x, n = max(min(x, pow2(50)), -pow2(50)), 0
    if not x:
        return F(0)
    while abs(x) >= pow2(n + 1):
        n += 1
    while abs(x) < pow2(n):
        n -= 1
    assert n >= -126
    return F(rhe(x / pow2(n - 7))) * pow2(n - 7)


class Side:
    """K or V of one head: codes and (scale, shift) per group of each token, by the quantizers of make.py."""

    tokens = {}  # of rows without a centre, which many cases have alike

    def __init__(self, scheme, side, case, dim, tensor_scale):
        self.scheme, self.dim, self.block, self.tensor_scale = scheme, dim, block_of(dim), tensor_scale
        self.rotated = scheme in ("int8", "int4", "int4-r2", "int4-w0", "int4-w4")
        self.half_steps = self.rotated and scheme != "int8"
        self.window = 0 if not self.half_steps or scheme == "int4-w0" else 4 if scheme == "int4-w4" else 2
        self.groups = {"int8-g32": dim // 32, "int4-r2": 2}.get(scheme) or (int(scheme[6:]) if scheme.startswith("int4-g") else 1)
        # Of latents the elements that V has, and a rotary key.
        self.parts = [case["head_dim"][1], dim - case["head_dim"][1]] if case["v"] == "latents" and not side else [dim]
        if len(self.parts) == 2:
            self.groups = 2
        self.codes, self.params, self.centres = [], [], []
        self.is_centred = bool(case["centres"]) and not side
        for t in range(case["kv_len"]):
            of_row = (side, t, dim, factor_of_v(case, t) if side else 1, 0 if side else case["bias"], self.rotated)
            if self.is_centred:
                codes, params = self.token(self.without_centre(t, row(*of_row)))
            else:
                codes, params = self.token_of(of_row)
            self.codes.append(codes)
            self.params.append(params)

    def token_of(self, of_row):
        """Codes and parameters of a row without a centre."""
        key = (of_row, self.scheme, self.groups, len(self.parts), self.tensor_scale)
        if key not in self.tokens:
            self.tokens[key] = self.token(row(*of_row))
        return self.tokens[key]

    def values(self, dim):
        """V of latents: the first elements of K, as they are stored."""
        v = copy.copy(self)
        v.dim, v.groups, v.codes = dim, 1, [codes[:dim] for codes in self.codes]
        return v

    def without_centre(self, t, x):
        """Section 12: a row of K without its centre, which two tokens make."""
        if t == 0:
            self.centres.append([to_bf16(v) for v in x])
        if t == TILE:
            sums = [F(0)] * self.dim
            for s in range(TILE):
                sums = [f32(a + self.stored(s, d)) for d, a in enumerate(sums)]
            self.centres.append([to_bf16(f32(c + a * pow2(-6))) for c, a in zip(self.centres[0], sums)])
        return [f32(v - c) for v, c in zip(x, self.centres[-1])]

    def stored(self, t, d):
        """What is stored at (t, d), read finely."""
        scale, code = self.params[t][d * self.groups // self.dim][0], self.codes[t][d]
        return (2 * code - 255) * (scale / 16) if self.half_steps else code * scale

    def token(self, x):
        if self.half_steps:
            n = self.dim // self.groups
            parts = [half_steps(x[g * n : (g + 1) * n]) for g in range(self.groups)]
            return sum((codes for codes, _ in parts), []), [(scale, F(0)) for _, scale in parts]
        scheme = "int8-plain" if self.scheme == "int8" else self.scheme
        codes, params, first = [], [], 0
        for dims in self.parts:
            of_part = token(scheme, x[first : first + dims], self.tensor_scale)
            codes, params, first = codes + of_part[0], params + of_part[1], first + dims
        if scheme.startswith("int4-g"):
            return [u - 8 for u in codes], [(scale, centred(scale, shift)) for scale, shift in params]
        return [(c ^ 128) - 128 for c in codes], params

    def fine(self, t, position):
        """Section 4: the tokens of the first tile, and those of the window."""
        return self.window > 0 and (t < TILE or position // TILE < t // TILE + self.window)

    def code(self, t, d, fine):
        code = self.codes[t][d]
        return code if fine or not self.half_steps else code & ~15


def score(k, q8, ratio, t, position):  # section 4, without the row's step
    fine, a, n = k.fine(t, position), None, k.dim // k.groups if len(k.parts) == 1 else k.parts[0]
    for g in range(k.groups):
        dims = range(g * n, min((g + 1) * n, k.dim))
        s, total = sum(q8[d] * k.code(t, d, fine) for d in dims), sum(q8[d] for d in dims)
        scale, shift = k.params[t][g] if k.params[t] else (None, F(0))
        if scale is None:
            term = f32(F(s))
        elif k.half_steps:
            term = f32(f32(F(2 * s - (255 if fine else 240) * total)) * (scale / 16))
        elif k.scheme.startswith("int4"):
            term = f32(f32(f32(F(s)) * scale) + f32(f32(F(total)) * shift))
        else:
            term = f32(f32(F(s)) * scale)
        term = f32(term * ratio) if g and len(k.parts) == 2 else term
        a = term if a is None else f32(a + term)
    return a


def modify(s, case, t, position):  # section 4
    if case["softcap"]:
        cap = F(case["softcap"])
        e2 = exp2f(max(-f32(abs(s) * f32(2 / cap)), F(-125)))
        y = f32(f32(f32(1 - e2) * rcp(f32(1 + e2))) * f32(cap * LOG2_E))
        s = y if s >= 0 else -y
    if case["alibi"]:
        s = f32(s + f32(f32(F(case["alibi"]) * LOG2_E) * f32(F(t - position))))
    return s


def base(k, q, tile):
    """Section 12: what a row's scores in a tile are added to on the grid. `q` is q' of section 3."""
    if not k.is_centred:
        return F(BASE)
    acc = [F(0)] * 16
    for d, (x, c) in enumerate(zip(q, k.centres[min(tile, 1)])):
        product = from_bits((bits(x) + 128) & ~255) * c
        assert product == f32(product)
        acc[d % 16] = f32(acc[d % 16] + product)
    for half in (8, 4, 2, 1):
        acc = [f32(a + b) for a, b in zip(acc[:half], acc[half:])]
    return f32(BASE + acc[0])


def weights(scores, sigma, base):  # section 5: the points of the tokens that are seen, and the exponent
    y = {t: f32(a * sigma + base) for t, a in scores.items()}
    top = max(y.values())
    if 131200 <= top < 262144:
        ceiling = F(-(-top // 1))
        m = f32(f32(ceiling - BASE) + 6)
    else:
        s = {t: f32(f32(a * sigma) + f32(base - BASE)) for t, a in scores.items()}
        c = F(-(-max(s.values()) // 1))
        y = {t: f32(max(f32(x - c), F(-65536)) + BASE) for t, x in s.items()}
        ceiling, m = F(BASE), f32(c + 6)
    # Weights below 2^-126 add to no number: -120 stands for what is lower, on the grid or not.
    points = {t: 64 * max(x - ceiling, F(-120)) - 384 for t, x in y.items()}
    assert all(n.denominator == 1 for n in points.values())
    return {t: int(n) for t, n in points.items()}, m


def tile_value(v, points, position):  # section 5
    tokens, n = list(points), v.dim // v.groups
    result, fine = [], v.fine(tokens[0], position)
    for g in range(v.groups):
        params = {t: v.params[t][g] if v.params[t] else (F(1), F(0)) for t in tokens}
        sixteenth = 256 if v.half_steps else 0
        scaled = {t: points[t] + scale_point(scale) - sixteenth for t, (scale, _) in params.items() if scale}
        kappa, inverse = step(max(scaled.values(), default=-3200), 2 if v.half_steps and fine else 3)
        w8 = [byte(scaled[t], inverse, t) if t in scaled else 0 for t in tokens]
        z = F(0)
        if v.scheme.startswith("int4-g"):
            parts = [F(0)] * 8
            for t, (_, shift) in params.items():
                parts[t % 8] = f32(parts[t % 8] + f32(units(points[t]) * pow2(-24) * shift))
            fours = [f32(parts[i] + parts[i + 1]) for i in range(0, 8, 2)]
            z = f32(f32(fours[0] + fours[1]) + f32(fours[2] + fours[3]))
        for d in range(g * n, (g + 1) * n):
            total = dot(w8, [v.code(t, d, fine) for t in tokens])
            if v.half_steps:
                total = 2 * total - (255 if fine else 240) * sum(w8)
            o = f32(F(total)) * kappa
            assert o == f32(o)
            result.append(f32(o + z))
    return result


def factor(k):  # section 6: pow2 of the page
    return pow2(k) if k >= -64 else F(0)


def fold(state, m_tile, l_tile, values):
    m, l, o = state or (None, F(0), [F(0)] * len(values))
    if m is not None and m_tile - m <= 40:
        a, b = F(1), factor(m_tile - m)
    else:
        a, b, m = factor(m - m_tile) if state else F(0), F(1), m_tile
    return m, f32(l * a + l_tile * b), [f32(ftz(f32(x * a)) + y * b) for x, y in zip(o, values)]


def merge(left, right):
    if left is None or right is None:
        return left or right
    (ma, la, oa), (mb, lb, ob) = left, right
    top = max(ma, mb)
    a, b = factor(ma - top), factor(mb - top)
    return top, f32(la * a + lb * b), [f32(ftz(x * a) + ftz(y * b)) for x, y in zip(oa, ob)]


def merged(states):
    result = None
    for state in states:
        result = merge(result, state)
    return result


def merge_sink(state, sink):  # section 7: the new maximum and sum, and the factor of O
    s = ftz(f32(ftz(sink) * LOG2_E))
    m_s = F(-(-s // 1))
    l_s = exp2f(f32(s - m_s))
    if state is None:
        return m_s, l_s, F(0)
    m, l, _ = state
    top = max(m, m_s)
    a, b = factor(m - top), factor(m_s - top)
    return top, f32(l * a + l_s * b), a


def prepare(q, k):
    """Section 3: q', the query's codes, its step, and the ratio of its parts' steps."""
    c = f32(f32(F(1, isqrt(k.dim)) * LOG2_E) * (k.tensor_scale or 1))
    q = [f32(x * c) for x in q]
    if k.rotated:
        q = rotate_back(q, k.block)
    n = k.parts[0]
    a = [max((abs(x) for x in part), default=F(0)) for part in (q[:n], q[n:])]
    if len(k.parts) == 2:
        a = [max(a[0], a[1] * pow2(-24)), max(a[1], a[0] * pow2(-24))]
    inverse = [f32(127 * rcp(x)) if x >= pow2(-60) else F(0) for x in a]
    codes = [clamp(rhe(f32(x * inverse[d >= n])), -127, 127) for d, x in enumerate(q)]
    if a[0] < pow2(-60):
        return q, codes, F(0), F(0)
    return q, codes, f32(a[0] * from_bits(0x3C010204)), f32(a[1] * rcp(a[0])) if a[1] else F(1)


def attend(case, k, v, q, sink):
    """The first of the query tokens, the last of which is the cache's last."""
    position = case["kv_len"] - (case["q_len"] or 1)
    kv_len = position + 1
    start = max(0, position - case["window"]) if case["window"] is not None else 0
    q, q8, sigma, ratio = prepare(q, k)
    num_tiles = -(-kv_len // TILE)
    segments = []
    for first in range(0, num_tiles, SEGMENT):
        state = None
        for tile in range(first, min(num_tiles, first + SEGMENT)):
            seen = range(max(start, tile * TILE), min(kv_len, (tile + 1) * TILE))
            if not seen:
                continue
            scores, unit, start_of = {t: score(k, q8, ratio, t, position) for t in seen}, sigma, base(k, q, tile)
            if case["softcap"] or case["alibi"]:
                scores = {t: f32(f32(a * sigma) + f32(start_of - BASE)) for t, a in scores.items()}
                scores, unit, start_of = {t: modify(s, case, t, position) for t, s in scores.items()}, F(1), F(BASE)
            points, m = weights(scores, unit, start_of)
            l = sum(units(n) for n in points.values()) * pow2(-24)
            state = fold(state, m, l, tile_value(v, points, position))
        segments.append(state)
    spans = [merged(segments[i : i + SPAN]) for i in range(0, len(segments), SPAN)]
    state = merged(spans)
    o = state[2] if state else [F(0)] * v.dim
    m, l, a = merge_sink(state, sink) if sink is not None else (*state[:2], F(1))
    y = rcp(l) * a
    out = [normal(f32(normal(f32(normal(x) * y)) * (v.tensor_scale or 1))) for x in o]
    if v.rotated:
        out = rotate_back(out, v.block, normal)
    return out, log_sum_exp(m, l)


CASES = [
    ("int8", "int8", 1700, {}),
    ("int4", "int4", 1612, {}),
    ("int8", "int4-w4", 400, {}),
    ("int4-r2", "int4-w0", 200, {}),
    ("int4-g4", "int4-g4", 333, {}),
    ("int8-g32", "int8-tensor", 333, {}),
    ("int8-tensor", "int4-g2", 333, {}),
    ("int8-plain", "int8-g32", 1100, {"window": 700, "softcap": 20, "alibi": F(1, 16)}),
    ("int4-g2", "int8-plain", 65, {"softcap": 5}),
    # Each head has its own sink: one a little heavier than the tokens, one lighter.
    ("int8-plain", "int8-plain", 1612, {"window": 900, "softcap": 20, "alibi": F(1, 16), "sinks": [F(9), F(-3)]}),
    ("int4", "int4", 333, {"sinks": [F(5, 4), F(40)]}),
    ("int8-g32", "int8-tensor", 130, {"sinks": [F(-(10**6)), F(-1, 4)]}),
    ("int8", "int8", 0, {"sinks": [F(10**6), F(1, 2**40)]}),
    # Scores beyond the grid's range in some tiles, or in all.
    ("int8-plain", "int8-plain", 333, {"query": 6154}),
    ("int8", "int8", 333, {"query": 2**16, "q_len": 20}),
    ("int4", "int4", 200, {"query": -(2**13), "q_len": 70}),
    ("int8-tensor", "int4-g4", 200, {"query": 2**15, "alibi": F(-1, 16), "sinks": [F(9), F(-3)]}),
    ("int8-plain", "int8-g32", 333, {"alibi": F(1000), "window": 250, "q_len": 3}),
    # Queries that count as zeros.
    ("int8-plain", "int8-plain", 130, {"query": F(1, 2**62), "q_len": 5, "window": 100}),
    # Tiles that exceed the first of their segment by more than 40, the next one or the second next, or fall behind it by more than 64.
    ("int8-plain", "int8-plain", 128, {"alibi": F(5, 8), "v_zero": (64, 128)}),
    ("int8-plain", "int8-plain", 190, {"alibi": F(1, 2)}),
    ("int8-plain", "int8-g32", 600, {"alibi": F(1, 4)}),
    ("int4-g2", "int8-plain", 260, {"alibi": F(3, 8), "v_zero": (128, 256)}),
    ("int8-plain", "int8-plain", 600, {"alibi": F(-1, 2), "v_zero": (0, 64)}),
    # V's scales: subnormal, and 0 beside others that are not.
    ("int8", "int8-plain", 200, {"v_halvings": (12, 3)}),
    ("int8", "int4", 200, {"v_halvings": (15, 2), "v_zero": (100, 140)}),
    ("int8", "int4-g2", 200, {"v_halvings": (14, 2), "v_zero": (100, 140)}),
    # Slopes that leave the first tile all the weight, where it is seen: the first tile that is seen is not read as the sequence's first.
    ("int4", "int4", 300, {"alibi": F(-1, 2)}),
    ("int8", "int4-w4", 500, {"alibi": F(-1, 2), "window": 450}),
    ("int4", "int4", 300, {"alibi": F(-1, 2), "window": 150}),
    # The largest scaled weight is below 2^-50.
    ("int8-plain", "int8-plain", 104, {"alibi": F(16), "window": 30, "v_halvings": (18, 0), "v_zero": (103, 104)}),
]

# K and V of unlike dims; keys have a square of them, whose softmax scale is exact.
CASES += [
    ("int8", "int8", 66, {"head_dim": (64, 160), "q_len": 2}),
    ("int4", "int8-plain", 70, {"head_dim": (256, 64)}),
    ("int8", "int4", 70, {"head_dim": (64, 192), "sinks": [F(5, 4), F(40)]}),
    ("int8", "int8", 20, {"head_dim": (576, 128), "centres": 1, "bias": F(5)}),
    ("int8", "latents", 66, {"head_dim": (576, 512), "q_len": 2}),
    ("int8-plain", "latents", 70, {"head_dim": (256, 160), "sinks": [F(5, 4), F(40)]}),
]

# Centres of K: sequences that end in the first tile, with it and behind it; keys with a bias and without; scores that count on the grid from a base far from
# its middle, and from one beyond it; and modifiers, which need the scores of the keys themselves.
CASES += [
    (k, v, kv_len, {"centres": 1, **options})
    for k, v, kv_len, options in [
        ("int8", "int8", 333, {"bias": F(5)}),
        ("int8", "int4", 64, {"bias": F(5), "q_len": 3}),
        ("int4", "int4", 300, {"bias": F(7), "sinks": [F(40), F(-3)]}),
        ("int4-r2", "int4-w0", 130, {}),
        ("int4-w4", "int8", 66, {"bias": F(3), "softcap": 30, "alibi": F(1, 16)}),
        ("int8", "int8-plain", 200, {"bias": F(5), "query": 2**6}),
        ("int4", "int4", 200, {"bias": F(9), "query": 2**7, "window": 150}),
        ("int8", "int4", 200, {"bias": F(9), "query": 2**9, "alibi": F(-1, 16)}),
        ("int8", "int4", 200, {"bias": F(9), "query": -(2**9)}),
    ]
]

OPTIONS = ("window", "softcap", "alibi", "sinks", "query", "q_len", "v_halvings", "v_zero", "bias", "centres", "head_dim")


def said(case):
    """The settings of a case as the test reads them."""

    def one(x):
        return "none" if x is None else ",".join(map(one, x)) if isinstance(x, (list, tuple)) else f"{float(x):.17g}"

    settings = [f"{key}={one(case[key])}" for key in ("window", "softcap", "alibi")]
    settings += [f"{key}={one(case[key])}" for key in OPTIONS[3:] if case[key] is not None]
    return f"k={case['k']} v={case['v']} kv_len={case['kv_len']} {' '.join(settings)}"


def text():
    lines = []
    for k_scheme, v_scheme, kv_len, options in CASES:
        case = {**dict.fromkeys(OPTIONS), **options, "k": k_scheme, "v": v_scheme, "kv_len": kv_len}
        lines.append(said(case))
        dims = case["head_dim"] or (64, 64)
        side = lambda i, s: Side(case[s], i, case, dims[i], F(1, 8) if case[s] == "int8-tensor" else None)  # noqa: E731
        k = side(0, "k")
        v = k.values(dims[1]) if v_scheme == "latents" else side(1, "v")
        for head in range(2):
            q = [F((d * 37 + head * 11 + 5) % 129 - 64, 64) * (case["query"] or 1) for d in range(k.dim)]
            out, lse = attend(case, k, v, q, case["sinks"][head] if case["sinks"] else None)
            lines.append(" ".join(f"{bits(x):08x}" for x in [*out, lse]))
    return "\n".join(lines) + "\n"


def main():
    write_or_check({"decode.txt": text()})


if __name__ == "__main__":
    main()
