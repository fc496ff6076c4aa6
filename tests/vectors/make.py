#!/usr/bin/env python3
"""Golden vectors: the rules of FORMATS.md in exact rationals, independent of the Rust code.

    python3 make.py           write the vectors beside this file
    python3 make.py --check   compare them instead
"""

import pathlib
import sys
from fractions import Fraction as F

F32_MAX = F(2) ** 128 - F(2) ** 104
F16_MAX = F(65504)
BF16_MAX = F(2) ** 50
ROTATED_MAX = F(2) ** 100


# Rounding: every number is an exact rational until one of these rounds it, half to even.


def rhe(x):
    return round(x)  # Python rounds a Fraction half to even


def exponent(x):
    """E with 2^E <= x < 2^(E+1)."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if x >= F(2) ** e else e - 1


def float_of(x, mantissa, least_exponent):
    """The nearest binary float of that many mantissa bits, subnormals included, overflow left alone. In integers, as most of the time goes here."""
    n, d = x.numerator, x.denominator
    if d & (d - 1) == 0 and n.bit_length() <= mantissa + 1 and d.bit_length() - 1 <= mantissa - least_exponent:
        return x  # it is one
    e = n.bit_length() - d.bit_length()
    if abs(n) << max(-e, 0) < d << max(e, 0):
        e -= 1
    quantum = max(e, least_exponent) - mantissa
    n, d = (n << -quantum, d) if quantum < 0 else (n, d << quantum)
    whole, rest = divmod(n, d)
    whole += 2 * rest > d or 2 * rest == d and whole % 2
    return F(whole, 1 << -quantum) if quantum < 0 else F(whole << quantum)


def f32(x):
    return float_of(x, 23, -126)


def f64(x):
    return float_of(x, 52, -1022)


def f16(x):
    return float_of(x, 10, -14)


def clamp(x, lo, hi):
    return max(lo, min(hi, x))


def to_f16(x):
    """Saturated."""
    return clamp(f16(x), -F16_MAX, F16_MAX)


def float_bits(x, mantissa, bias, negative):
    """Sign, exponent and mantissa of a representable number."""
    width = {23: 8, 10: 5, 7: 8, 3: 4}[mantissa]
    x = abs(x)
    if x < F(2) ** (1 - bias):
        low = x / F(2) ** (1 - bias - mantissa)
    else:
        e = exponent(x)
        low = ((e + bias) << mantissa) + (x / F(2) ** e - 1) * 2**mantissa
    assert low == int(low)
    return int(negative) << (width + mantissa) | int(low)


def f16_bits(x, negative=None):
    return float_bits(x, 10, 15, x < 0 if negative is None else negative)


def bf16_bits(x):
    most = F(2) ** 128 - F(2) ** 120
    return float_bits(float_of(clamp(x, -most, most), 7, -126), 7, 127, x < 0)


def fp8_bits(x, scale):
    return float_bits(clamp(float_of(x / scale, 3, -6), F(-448), F(448)), 3, 7, x < 0)


# Inputs.


def value(side, head, t, d):
    """Fixed values, all of them f32: ties, zeros, an outlier and a subnormal, then a ragged pattern."""
    if t == 0:  # quarters up to 63.5: int8's scale is 0.5, so half the quotients are ties
        return F((d * 29 + head * 7 + side * 3 + 254) % 509 - 254, 4) if d else F(127, 2)
    if t == 1:
        return F(0)
    if t == 2 and (side, d) == (1, 5):
        return F32_MAX
    if t == 2 and (side, d) == (0, 7):
        return -3 * F(2) ** -149
    return F((t * 7919 + head * 104729 + side * 1299 + d * d * 31 + d * 17 + 11) % 2001 - 1000, 128)


# Quantizers: codes, and (scale, shift) per group.


def int8_codes(x, scale):
    return [clamp(rhe(v / scale), -127, 127) & 255 if scale else 0 for v in x]


def int8_group(x):
    scale = to_f16(max(abs(v) for v in x) / 127)
    return int8_codes(x, scale), (scale, F(0))


def int4_group(x):
    lo, hi = min(x), max(x)
    scale = to_f16(min(f32(hi - lo), F32_MAX) / 15)
    shift = to_f16(lo)
    codes = [clamp(rhe(f32(v - shift) / scale), 0, 15) if scale else 0 for v in x]
    return codes, (scale, shift)


def half_step_group(x):
    """8-bit codes c of half steps: c >> 4 is the code, c & 15 the residual."""
    scale = to_f16(max(abs(v) for v in x) / 16)
    return [clamp(8 * v // scale + 128, 0, 255) if scale else 128 for v in x], (scale, F(0))


def rotated(x, query=False):
    """The row as rotated schemes store it: each block times Sylvester's matrix, every sum rounded to f32, times 2^-floor(log2(block) / 2).

    Of a query the exponent is rounded up."""
    block = 1
    while len(x) % (2 * block) == 0:
        block *= 2
    result = []
    for first in range(0, len(x), block):
        # Larger inputs are refused, so that the inputs' outlier is the largest that a rotated scheme takes.
        part = [clamp(v, -ROTATED_MAX, ROTATED_MAX) for v in x[first : first + block]]
        s = 1
        while s < block:
            for i in range(block):
                if i & s == 0:
                    a, b = part[i], part[i + s]
                    part[i], part[i + s] = f32(a + b), f32(a - b)
            s *= 2
        halvings = (block.bit_length() - 1 + query) // 2
        result += [f32(v / 2**halvings) for v in part]
    return result


def is_rotated_int4(scheme):
    return scheme.startswith("int4") and not scheme.startswith("int4-g")


def groups_of(scheme, dim):
    """Groups of a row that have parameters: `int4-g2`, `int4-r2-w4`, `int8-g32`."""
    if scheme == "int8-g32":
        return dim // 32
    for part in scheme.split("-"):
        if part[0] in "gr" and part[1:].isdigit():
            return int(part[1:])
    return 1


def window_of(scheme):
    """Tiles that are read with residuals, beside the first."""
    if not is_rotated_int4(scheme):
        return 0
    return 0 if "-w0" in scheme else 4 if "-w4" in scheme else 2


def grouped(quantizer, groups, x):
    n = len(x) // groups
    parts = [quantizer(x[g * n : (g + 1) * n]) for g in range(groups)]
    return sum((codes for codes, _ in parts), []), [param for _, param in parts]


def token(scheme, x, scale):
    """Codes and parameters of one token of one head."""
    if scheme == "f16":
        return [f16_bits(to_f16(v), v < 0) for v in x], []
    if scheme == "bf16":
        # Larger inputs are refused, so that the inputs' outlier is the largest that bf16 takes.
        return [bf16_bits(clamp(v, -BF16_MAX, BF16_MAX)) for v in x], []
    if scheme == "fp8":
        return [fp8_bits(v, scale) for v in x], []
    if scheme == "int8-tensor":
        return int8_codes(x, scale), []
    groups = groups_of(scheme, len(x))
    if scheme in ("int8-plain", "int8-g32"):
        return grouped(int8_group, groups, x)
    if scheme == "int8":
        return grouped(int8_group, groups, rotated(x))
    if is_rotated_int4(scheme):
        return grouped(half_step_group, groups, rotated(x))
    return grouped(int4_group, groups, x)


# Pages.


def has_shifts(scheme):
    return scheme.startswith("int4-g")


def bits_of(scheme):
    return 16 if scheme in ("f16", "bf16") else 4 if scheme.startswith("int4") else 8


def slot(t):
    h, c, e = t // 8, t % 8 // 2, t % 2
    return 4 * c + 2 * h + e


def k_address(bits, dim, page_size, t, d):
    """Byte offset, and the bits to shift left."""
    if bits == 16:
        return (d // 8 * page_size + t) * 16 + d % 8 * 2, 0
    if bits == 8:
        return (d // 16 * page_size + t) * 16 + d % 16, 0
    # Of 16 tokens 0..8 are low nibbles, 8..16 high ones: 8 rows.
    row, high = t // 16 * 8 + t % 8, t // 8 % 2
    return (d // 16 * (page_size // 2) + row) * 16 + d % 16, 4 * high


def v_address(bits, dim, page_size, t, d):
    if bits == 16:
        return k_address(16, dim, page_size, t, d)
    if bits == 8:
        return (t // 16 * dim + d) * 16 + slot(t % 16), 0
    # The same of dims.
    row, high = d // 16 * 8 + d % 8, d // 8 % 2
    return (t // 16 * (dim // 2) + row) * 16 + slot(t % 16), 4 * high


def part_bytes(scheme, dim, page_size):
    """Of the codes and of the parameters."""
    codes = page_size * dim * bits_of(scheme) // 8
    if bits_of(scheme) == 16 or scheme in ("fp8", "int8-tensor"):
        return codes, 0
    return codes, groups_of(scheme, dim) * page_size * (4 if has_shifts(scheme) else 2)


def put_codes(run, base, address, scheme, dim, page_size, t, codes):
    bits = bits_of(scheme)
    for d, code in enumerate(codes):
        at, shift = address(bits, dim, page_size, t, d)
        if bits == 16:
            run[base + at : base + at + 2] = code.to_bytes(2, "little")
        else:
            run[base + at] |= code << shift


def put_f16(run, at, x):
    run[at : at + 2] = f16_bits(x).to_bytes(2, "little")


def put_params(run, base, scheme, page_size, t, params):
    for g, (scale, shift) in enumerate(params):
        if has_shifts(scheme):
            put_f16(run, base + (g * page_size + t) * 4, scale)
            put_f16(run, base + (g * page_size + t) * 4 + 2, shift)
        else:
            put_f16(run, base + (g * page_size + t) * 2, scale)


def has_residuals(i, window, page_size, tokens):
    """Whether home page i of a sequence outside of a cache has residuals: one of the first 64 tokens, or one that the newest 64 read."""
    newest = max(0, tokens - 64) // 64
    return window > 0 and (i * page_size < 64 or i >= 64 * max(0, newest + 1 - window) // page_size)


def pages(k, v, dims, page_size, heads, tokens, scales):
    """Home pages of K and V with so many dims each, then residual pages; unwritten bytes are zero."""
    sides = [(k, k_address), (v, v_address)]
    sizes = [part_bytes(scheme, dim, page_size) for (scheme, _), dim in zip(sides, dims)]
    run_bytes = sum(map(sum, sizes))
    count = -(-tokens // page_size)
    window = max(window_of(k), window_of(v))
    home, residual = [], []
    for i in range(count):
        page, fine = bytearray(), bytearray()
        for head in range(heads):
            run, fine_run = bytearray(run_bytes), bytearray(run_bytes)
            base, fine_base = 0, 0
            for side, (scheme, address) in enumerate(sides):
                (codes_bytes, params_bytes), dim = sizes[side], dims[side]
                for t in range(i * page_size, min(tokens, (i + 1) * page_size)):
                    x = [value(side, head, t, d) for d in range(dim)]
                    codes, params = token(scheme, x, scales[side])
                    at = t - i * page_size
                    if window_of(scheme):
                        low = [c & 15 for c in codes]
                        put_codes(fine_run, fine_base, address, scheme, dim, page_size, at, low)
                    if is_rotated_int4(scheme):
                        codes = [c >> 4 for c in codes]
                    put_codes(run, base, address, scheme, dim, page_size, at, codes)
                    put_params(run, base + codes_bytes, scheme, page_size, at, params)
                base += codes_bytes + params_bytes
                fine_base += codes_bytes if window_of(scheme) else 0
            page += run
            fine += fine_run
        home.append(page)
        if has_residuals(i, window, page_size, tokens):
            residual.append((i, fine))
    return home, residual


# Rows of other engines, each step rounded as their programs round it.


def fbgemm_row(x, groups):
    head, codes, n = bytearray(), [], len(x) // groups
    for g in range(groups):
        part = x[g * n : (g + 1) * n]
        lo, hi = min(part), max(part)
        scale = f32(f32(hi - lo) / 15)
        inverse = f64(15 / f64(f64(scale * 15) + f64(F(1, 10**8))))
        codes += [rhe(f32(f64(f32(v - lo) * inverse))) & 15 for v in part]
        head += f16_bits(f16(scale)).to_bytes(2, "little")
        head += f16_bits(f16(lo), lo < 0).to_bytes(2, "little")
    return head + bytes(codes[i] | codes[i + 1] << 4 for i in range(0, len(x), 2))


def q8_0_row(x):
    row = bytearray()
    for i in range(0, len(x), 32):
        part = x[i : i + 32]
        d = f32(max(abs(v) for v in part) / 127)
        inverse = f32(1 / d) if d else F(0)
        row += f16_bits(f16(d)).to_bytes(2, "little")
        for v in part:
            y = f32(v * inverse)
            away = int(abs(y) + F(1, 2))  # half away from zero
            row.append((away if y >= 0 else -away) & 255)
    return row


def q4_0_row(x):
    row = bytearray()
    for i in range(0, len(x), 32):
        part, most = x[i : i + 32], F(0)
        for v in part:
            most = v if abs(v) > abs(most) else most
        d = f32(most / -8)
        inverse = f32(1 / d) if d else F(0)
        row += f16_bits(f16(d), most >= 0).to_bytes(2, "little")  # 0 / -8 is -0
        codes = [min(15, int(f32(f32(v * inverse) + F(17, 2)))) for v in part]
        row += bytes(codes[j] | codes[j + 16] << 4 for j in range(16))
    return row


# Files.


def lines(data):
    """`offset: 16 bytes`; lines of zeros are left out."""
    for at in range(0, len(data), 16):
        if any(data[at : at + 16]):
            yield f"{at:05x}: {data[at : at + 16].hex(' ')}"


def page_file(k, v, dims, page_size, heads, tokens):
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    head_dim = "/".join(map(str, dims[:1] if dims[0] == dims[1] else dims))
    scales = [F(1, 8) if s in ("fp8", "int8-tensor") else None for s in (k, v)]
    text = [f"k={k} v={v} head_dim={head_dim} page_size={page_size} heads={heads} tokens={tokens}"]
    home, residual = pages(k, v, dims, page_size, heads, tokens, scales)
    for i, page in enumerate(home):
        text += [f"page {i}, {len(page)} bytes", *lines(page)]
    for i, page in residual:
        text += [f"residuals of page {i}, {len(page)} bytes", *lines(page)]
    return "\n".join(text) + "\n"


def row_file():
    text = []
    for t in (0, 1, 3, 4):
        x = [value(0, 0, t, d) for d in range(128)]
        for groups in (1, 2, 4, 8):
            text.append(f"fbgemm-int4-g{groups} {t} {fbgemm_row(x, groups).hex()}")
        text.append(f"q8_0 {t} {q8_0_row(x).hex()}")
        text.append(f"q4_0 {t} {q4_0_row(x).hex()}")
    return "\n".join(text) + "\n"


def rotation_file():
    """Per head_dim: the input's bits are written, too, so that a reader needs no formula."""
    text = []
    for dim in (64, 80, 96, 128, 160, 192, 256, 320, 512, 576):
        # Of several magnitudes, so that the order of the sums shows in their last bits.
        mixed = [pow(d + 7 * dim, 5, 2**31 - 1) for d in range(dim)]
        x = [F(n % 2**24 - 2**23, 2 ** (20 + n % 7)) for n in mixed]
        for name, row in [("row", x), ("stored", rotated(x)), ("query", rotated(x, True))]:
            text.append(" ".join([name, *(f"{float_bits(v, 23, 127, v < 0):08x}" for v in row)]))
    return "\n".join(text) + "\n"


def write_or_check(files):
    """Writes files beside this one; or, asked by --check, ends the program if some of them have another text."""
    here, stale = pathlib.Path(__file__).parent, []
    for name, text in files.items():
        path = here / name
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        sys.exit(f"another text than its program writes: {', '.join(stale)}; run python3 {sys.argv[0]}")


def main():
    files = {"rows.txt": row_file(), "rotation.txt": rotation_file()}
    plain = ["f16", "bf16", "fp8", "int8-plain", "int8-g32", "int8-tensor", "int4-g1", "int4-g2", "int4-g4"]
    for scheme in [*plain, "int8", "int4"]:
        files[f"{scheme}.txt"] = page_file(scheme, scheme, 64, 64, 1, 4)
    files["int4-g8.txt"] = page_file("int4-g8", "int4-g8", 128, 32, 1, 4)
    # An odd number of panels, two heads, a third page, which ends among the low nibbles.
    for scheme in ["int4-g1", "int8", "int4"]:
        files[f"{scheme}-d80.txt"] = page_file(scheme, scheme, 80, 16, 2, 35)
    # Residuals of V alone; of K's and V's groups, with windows of two lengths.
    files["int8-int4-d128.txt"] = page_file("int8", "int4", 128, 32, 1, 4)
    files["int4-r2-w4-int4-d128.txt"] = page_file("int4-r2-w4", "int4", 128, 32, 1, 35)
    # K and V of unlike dims.
    files["int8-d192-128.txt"] = page_file("int8", "int8", (192, 128), 16, 2, 3)
    files["int4-g1-int4-d64-160.txt"] = page_file("int4-g1", "int4", (64, 160), 32, 1, 4)
    # A page of 128 tokens, and two of 32, between the first tile and the window have no residuals.
    files["int4-long.txt"] = page_file("int4", "int4-w0", 64, 128, 1, 400)
    files["int8-int4-long.txt"] = page_file("int8", "int4", 64, 32, 1, 260)
    write_or_check(files)


if __name__ == "__main__":
    main()
