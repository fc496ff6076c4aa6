#!/usr/bin/env python3
"""Golden results of decode: the integer arithmetic of docs/arithmetic.md in exact rationals, independent of the Rust code.

    python3 decode.py           write decode.txt beside this file
    python3 decode.py --check   compare it instead

Section numbers are those of the page. Every `f32(...)` is one rounding; numbers are rationals, so a sign of zero is lost: no result here is zero but +0, where no token is seen.
"""

import struct
import sys
from fractions import Fraction as F

import pathlib

from make import clamp, exponent, f32, int4_group, rhe, token, value

TILE, SPAN = 64, 4
SMALLEST = F(2) ** -126


def const(bits):
    return F(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits(x):
    return struct.unpack("<I", struct.pack("<f", float(x)))[0]


def from_bits(b):
    return const(b & 0xFFFFFFFF)


def pow2(n):
    return F(2) ** n


def exp_or(x, base):
    """base - E(x) for a scale or shift, which is a multiple of 2^-24 or zero."""
    return base - exponent(x) if x else 0


LOG2_E, LN_2 = const(0x3FB8AA3B), const(0x3F317218)
EXP2W = [const(b) for b in (0x3D620000, 0x3E786F4E, 0x3F317982, 0x3F7FFB48)]
B = F(2) + F(1, 2**15)
EXP2F = [const(b) for b in (0x3AADFE47, 0x3C1E7726, 0x3D635B15, 0x3E75FCD9, 0x3F317216)] + [F(1)]
LOG2 = [
    const(b)
    for b in (0x3E090EF7, 0xBE607D7C, 0x3E5F6D97, 0xBE72988E, 0x3E931B3E, 0xBEB8BC98, 0x3EF63E7D, 0xBF38AA18, 0x3FB8AA36)
]


def polynomial(r, coefficients):
    y = coefficients[0]
    for c in coefficients[1:]:
        y = f32(f32(y * r) + c)
    return y


def exp2w(v):  # section 4: 2^(1 - v)
    assert 0 <= v <= 64
    t = f32(12582913 - v)
    n = f32(t - 12582913)
    p = from_bits(bits(polynomial(f32(-v - n), EXP2W)) + (bits(t) << 23))
    assert 0 < p < 2
    return p


def p22(p):  # section 4
    return bits(f32(p + B)) - bits(B)


def exp2f(x):  # section 7
    t = f32(x + 12582912)
    n = f32(t - 12582912)
    return from_bits(bits(polynomial(f32(x - n), EXP2F)) + (bits(t) << 23))


def rcp(x):  # section 6
    y = from_bits(0x7EF311C7 - bits(x))
    for _ in range(4):
        y = f32(y * f32(2 - f32(x * y)))
    return y


def log_sum_exp(m, l):  # section 6
    i = bits(l) - 0x3F3504F3
    k, u = i >> 23, f32(from_bits((i & 0x7FFFFF) + 0x3F3504F3) - 1)
    y = LOG2[0]
    for c in LOG2[1:]:
        y = f32(f32(y * u) + c)
    return f32(f32(f32(m + k) + f32(y * u)) * LN_2)


def ftz(x):
    return x if abs(x) >= SMALLEST else F(0)


def below(a):  # section 2
    return f32(a * (1 + pow2(-14)))


def plane(x, a=None):  # section 2
    a = a or max(abs(v) for v in x)
    e = clamp(13 - exponent(below(a)), -70, 60) if a else 0
    q15 = [rhe(v * pow2(e)) for v in x]
    assert all(abs(q) <= 16383 for q in q15)
    return q15, e


def round_13(x):  # section 2
    return from_bits((bits(x) + 0x400) & ~0x7FF) if x else x


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def centred(scale, shift):
    return f32(shift + 8 * scale)


class Side:
    """K or V of one head: signed codes and parameters per token, by the quantizers of make.py."""

    def __init__(self, scheme, side, dim, kv_len, page_size, tensor_scale):
        self.scheme, self.dim, self.tensor_scale = scheme, dim, tensor_scale
        self.codes, self.params, self.channel = [], [], {}
        self.page_size = page_size
        for t in range(kv_len):
            x = [value(side, 0, t, d) for d in range(dim)]
            codes, params = token("int8" if scheme == "int4-channel" else scheme, x, tensor_scale)
            if scheme.startswith("int4-g"):
                self.codes.append([u - 8 for u in codes])
                self.params.append([(scale, centred(scale, shift)) for scale, shift in params])
            else:
                self.codes.append([(c ^ 128) - 128 for c in codes])
                self.params.append(params)
        if scheme == "int4-channel":
            for page in range(kv_len // page_size):
                self.seal(page)

    def seal(self, page):
        first = page * self.page_size
        tokens = range(first, first + self.page_size)
        params = []
        for d in range(self.dim):
            codes, (scale, shift) = int4_group([self.codes[t][d] * self.params[t][0][0] for t in tokens])
            for t, u in zip(tokens, codes):
                self.codes[t][d] = u - 8
            params.append((scale, centred(scale, shift)))
        self.channel[page] = params


def channel_terms(q, params):  # section 3, sealed Int4 Channel
    scales, shifts = [scale for scale, _ in params], [shift for _, shift in params]
    folded = [a * scale for a, scale in zip(q, scales)]
    assert folded == [f32(x) for x in folded]
    fours = [slice(d, d + 4) for d in range(0, len(q), 4)]
    bound = max(f32(max(map(abs, q[i])) * max(scales[i])) for i in fours)
    a, b = max(map(abs, q)), max(map(abs, shifts))
    j = clamp(20 - exponent(a) - exponent(b), -100, 100) if a and b else 0
    y = sum(rhe(f32(x * s) * pow2(j)) for x, s in zip(q, shifts))
    return *plane(folded, bound), f32(F(y)) * pow2(-j)


def score(k, q, planes, t):  # section 3
    page = t // k.page_size
    if page in k.channel:
        if page not in planes:
            planes[page] = channel_terms(q, k.channel[page])
        q15, e, y = planes[page]
        return f32(f32(F(dot(q15, k.codes[t]))) * pow2(-e) + y)
    if None not in planes:
        planes[None] = plane(q)
    q15, e = planes[None]
    if k.scheme == "int8-tensor":
        return f32(F(dot(q15, k.codes[t]))) * pow2(-e)
    n, a = k.dim // len(k.params[t]), None
    for g, (scale, shift) in enumerate(k.params[t]):
        dims = slice(g * n, (g + 1) * n)
        term = f32(f32(F(dot(q15[dims], k.codes[t][dims]))) * scale)
        a = term if a is None else f32(a + term)
        if k.scheme.startswith("int4-g"):
            a = f32(a + f32(f32(F(sum(q15[dims]))) * shift))
    return a * pow2(-e)


def modify(s, case, t, position):  # section 3
    if case["softcap"]:
        cap = F(case["softcap"])
        e2 = exp2f(max(-f32(abs(s) * f32(2 / cap)), F(-125)))
        y = f32(f32(f32(1 - e2) * rcp(f32(1 + e2))) * f32(cap * LOG2_E))
        s = y if s >= 0 else -y
    if case["alibi"]:
        s = f32(s + f32(f32(F(case["alibi"]) * LOG2_E) * f32(F(t - position))))
    return s


def tile_value(v, p, tokens):  # section 4
    result = []
    groups = 1 if v.scheme == "int8-tensor" else len(v.params[tokens[0]])
    n = v.dim // groups
    for g in range(groups):
        params = [(F(1), F(0)) if v.scheme == "int8-tensor" else v.params[t][g] for t in tokens]
        f = exp_or(max(scale for scale, _ in params), 14)
        w16 = [rhe(f32(w * (scale * pow2(f)))) for w, (scale, _) in zip(p, params)]
        assert all(0 <= w <= 65504 for w in w16)
        z = F(0)
        if v.scheme.startswith("int4"):
            h = exp_or(below(max(abs(shift) for _, shift in params)), 14)
            sh = [rhe(shift * pow2(h)) for _, shift in params]
            assert all(abs(s) < 2**15 for s in sh)
            p14 = [(p22(w) + 128) >> 8 for w in p]
            assert all(0 <= w <= 2**15 for w in p14)
            hi, lo = dot(p14, [s >> 8 for s in sh]), dot(p14, [s & 255 for s in sh])
            z = f32(f32(F(hi)) * 256 + f32(F(lo))) * pow2(-14 - h)
        for d in range(g * n, (g + 1) * n):
            o = f32(F(dot(w16, [v.codes[t][d] for t in tokens]))) * pow2(-f)
            result.append(f32(o + z))
    return result


def weight(distance):  # section 5
    return pow2(-distance) if 0 <= distance <= 64 else F(0)


def fold(state, m_tile, l_tile, values):
    if state is None:
        m, l, o = m_tile, F(0), [F(0)] * len(values)
    else:
        m, l, o = state
    top = max(m, m_tile)
    a, b = weight(top - m), weight(top - m_tile)
    l = f32(l * a + f32(F(l_tile)) * pow2(-22) * b)
    return top, l, [f32(ftz(x * a) + y * b) for x, y in zip(o, values)]


def merge(left, right):
    if left is None or right is None:
        return left or right
    (ma, la, oa), (mb, lb, ob) = left, right
    top = max(ma, mb)
    a, b = weight(top - ma), weight(top - mb)
    return top, f32(la * a + lb * b), [f32(ftz(x * a) + ftz(y * b)) for x, y in zip(oa, ob)]


def merged(states):
    result = None
    for state in states:
        result = merge(result, state)
    return result


def merge_sink(state, sink):  # section 6: the new maximum and sum, and the factor of O
    s = ftz(f32(ftz(sink) * LOG2_E))
    m_s = F(-(-s // 1))
    l_s = exp2f(f32(s - m_s))
    if state is None:
        return m_s, l_s, F(0)
    m, l, _ = state
    top = max(m, m_s)
    a, b = weight(top - m), weight(top - m_s)
    return top, f32(l * a + l_s * b), a


def attend(case, k, v, q, sink):
    """One query token at the last position."""
    kv_len, position = case["kv_len"], case["kv_len"] - 1
    start = max(0, position - case["window"]) if case["window"] is not None else 0
    c = f32(f32(F(1, 8) * LOG2_E) * (k.tensor_scale or 1))
    q, planes = [f32(x * c) for x in q], {}
    if k.scheme == "int4-channel":
        q = [round_13(x) for x in q]
    num_tiles = -(-kv_len // TILE)
    segment_tiles = 4
    while segment_tiles < -(-num_tiles // 256):
        segment_tiles *= 2
    segments = []
    for first in range(0, num_tiles, segment_tiles):
        state = None
        for tile in range(first, min(num_tiles, first + segment_tiles)):
            tokens = range(tile * TILE, min(kv_len, (tile + 1) * TILE))
            scores = {t: modify(score(k, q, planes, t), case, t, position) for t in tokens if t >= start}
            if not scores:
                continue
            top = F(-(-max(scores.values()) // 1))
            m = f32(top - 1)
            p = [exp2w(min(f32(top - scores[t]), F(64))) if t in scores else F(0) for t in tokens]
            l = sum(p22(w) for w in p)
            state = fold(state, m, l, tile_value(v, p, tokens))
        segments.append(state)
    spans = [merged(segments[i : i + SPAN]) for i in range(0, len(segments), SPAN)]
    state = merged(spans)
    o = state[2] if state else [F(0)] * v.dim
    m, l, a = merge_sink(state, sink) if sink is not None else (*state[:2], F(1))
    y = rcp(l) * a
    out = [ftz(f32(ftz(f32(ftz(x) * y)) * (v.tensor_scale or 1))) for x in o]
    assert all(out) or not state
    return out, log_sum_exp(m, l)


CASES = [
    ("int8", "int8", 1700, {}),
    ("int4-channel", "int4-g1", 1612, {}),
    ("int4-g4", "int4-g4", 333, {}),
    ("int8-g32", "int8-tensor", 333, {}),
    ("int8-tensor", "int4-g2", 333, {}),
    ("int8", "int8-g32", 1100, {"window": 700, "softcap": 20, "alibi": F(1, 16)}),
    ("int4-g2", "int8", 65, {"softcap": 5}),
    # Each head has its own sink: one a little heavier than the tokens, one lighter.
    ("int8", "int8", 1612, {"window": 900, "softcap": 20, "alibi": F(1, 16), "sinks": [F(9), F(-3)]}),
    ("int4-channel", "int4-g1", 333, {"sinks": [F(5, 4), F(40)]}),
    ("int8-g32", "int8-tensor", 130, {"sinks": [F(-(10**6)), F(-1, 4)]}),
    ("int8", "int8", 0, {"sinks": [F(10**6), F(1, 2**40)]}),
]


def text():
    lines, dim = [], 64
    for k_scheme, v_scheme, kv_len, options in CASES:
        case = {"window": None, "softcap": None, "alibi": None, "sinks": None, **options, "kv_len": kv_len}
        scale = lambda s: F(1, 8) if s == "int8-tensor" else None
        k = Side(k_scheme, 0, dim, kv_len, 64, scale(k_scheme))
        v = Side(v_scheme, 1, dim, kv_len, 64, scale(v_scheme))
        said = " ".join(f"{key}={float(case[key]):g}" if case[key] is not None else f"{key}=none" for key in ("window", "softcap", "alibi"))
        if case["sinks"]:
            said += " sinks=" + ",".join(f"{float(sink):.17g}" for sink in case["sinks"])
        lines.append(f"k={k_scheme} v={v_scheme} kv_len={kv_len} {said}")
        for head in range(2):
            q = [F((d * 37 + head * 11 + 5) % 129 - 64, 64) for d in range(dim)]
            out, lse = attend(case, k, v, q, case["sinks"][head] if case["sinks"] else None)
            lines.append(" ".join(f"{bits(x):08x}" for x in [*out, lse]))
    return "\n".join(lines) + "\n"


def main():
    path = pathlib.Path(__file__).with_name("decode.txt")
    if "--check" not in sys.argv:
        path.write_text(text())
    elif path.read_text() != text():
        sys.exit(f"decode.txt is not what decode.py writes; run python3 {sys.argv[0]}")


if __name__ == "__main__":
    main()
