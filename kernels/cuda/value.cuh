// Sections 4 and 5 of docs/arithmetic.md: softmax weights of a tile, P·V, and the fold into the segment's state.
#pragma once
#include "score.cuh"

struct State {
    float m[ROW_GROUPS], l[ROW_GROUPS];  // of query row lane/4
    float o[ROW_GROUPS][DIMS / 8][2];    // of the dims that `dim_of` gives

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            m[g] = MINUS_INFINITY;
            l[g] = 0.0f;
#pragma unroll
            for (int j = 0; j < DIMS / 8; j++) o[g][j][0] = o[g][j][1] = 0.0f;
        }
    }
    // The dim of o[g][j][i]: 8j + 2·(lane%4) + i, or, where V is transposed while it is loaded (V_TOKEN_MAJOR), one of four neighbouring
    // dims that a lane has in two accumulators. `pair_of` is the first dim of the lane's j-th pair of neighbouring dims.
    DEVICE int dim_of(int j, int i, int lane) { return V_TOKEN_MAJOR ? 8 * (j & ~1) + 4 * (lane % 4) + 2 * i + (j & 1) : 8 * j + 2 * (lane % 4) + i; }
    DEVICE int pair_of(int j, int lane) { return V_TOKEN_MAJOR ? 8 * (j & ~1) + 4 * (lane % 4) + 2 * (j & 1) : 8 * j + 2 * (lane % 4); }
    // Calls take(dim, x, y) for each of the lane's pairs: x is O of dim, y of dim + 1.
    template <class Take> __device__ __forceinline__ void each_pair(int g, int lane, Take take) const {
#pragma unroll
        for (int j = 0; j < DIMS / 8; j++) {
            if (V_TOKEN_MAJOR) take(pair_of(j, lane), o[g][j & ~1][j & 1], o[g][j | 1][j & 1]);
            else take(pair_of(j, lane), o[g][j][0], o[g][j][1]);
        }
    }
};

// Folding a tile into a state multiplies the state by alpha and the tile's value by beta, both powers of two.
struct Rescale {
    float alpha[ROW_GROUPS], beta[ROW_GROUPS];
    int weights[ROW_GROUPS];  // the lane's part of l, times 2^22
};

DEVICE int quad_sum(int x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// p14 of section 4, two tokens to a word; only V with shifts (int4) needs it.
struct Pairs {
    u32 p14[ROW_GROUPS][V_INT4 ? SCORES / 2 : 1];
};

// `softmax_tile` updates the running maximum; this updates only `l`.
DEVICE void add_weights(State& state, int g, int l, const Rescale& r) {
    state.l[g] = fmaf((float)l, exp2i(-22) * r.beta[g], state.l[g] * r.alpha[g]);
}

// Sets `tops` to each row's largest score in base 2, rounded up to an integer. Scores of masked tokens become -inf.
template <class Seen> DEVICE void row_max(float (&s)[ROW_GROUPS][SCORES], const float (&scale)[ROW_GROUPS], bool full, Seen seen, float (&tops)[ROW_GROUPS]) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        if (!full) {
#pragma unroll
            for (int i = 0; i < SCORES; i++)
                if (!seen(g, i)) s[g][i] = MINUS_INFINITY;
        }
        float top[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            top[i] = s[g][i];
            if (SCORES == 16) top[i] = fmaxf(fmaxf(top[i], s[g][(i + 4) % SCORES]), fmaxf(s[g][(i + 8) % SCORES], s[g][(i + 12) % SCORES]));
        }
        tops[g] = ceilf(quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]))) * scale[g]);
    }
}

// Replaces scores by weights p and updates the running maxima m; l and O are rescaled later. A masked token gets a weight of 2^-63 or less,
// which rounds to 0 in every integer computed from it.
DEVICE void softmax_tile(float (&s)[ROW_GROUPS][SCORES], const float (&scale)[ROW_GROUPS], bool full, const float (&tops)[ROW_GROUPS], float (&running)[ROW_GROUPS], Rescale& r, Pairs& pairs) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        float m = tops[g];
        bool some = full || m > MINUS_INFINITY;
        float from = some ? m : 0.0f;
        u32 l = 0, bits[2];
        float down = -0.015625f * scale[g], offset = 0.015625f * from;
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            float p;
            if constexpr (INTEGER) p = exp2w(fma_saturate(s[g][i], down, offset));
            else p = exp2f_full(fmaxf(fmaf(s[g][i], scale[g], -from), -125.0f));
            s[g][i] = p;
            bits[i % 2] = float_bits(p + WEIGHT_BASE);
            l += bits[i % 2];
            if (V_INT4 && i % 2 == 1) pairs.p14[g][i / 2 % (V_INT4 ? SCORES / 2 : 1)] = __byte_perm(bits[0], bits[1], 0x6521);
        }
        l -= SCORES * WEIGHT_BASE_BITS;
        if (INTEGER) m = m - 1.0f;
        float top_m = some ? fmaxf(running[g], m) : running[g];
        r.alpha[g] = some ? pow2(top_m - running[g]) : 1.0f;
        r.beta[g] = some ? pow2(top_m - m) : -0.0f;  // -0: adding a product with it changes no bit, the sign of a zero included
        r.weights[g] = (int)l;
        running[g] = top_m;
    }
}

// The powers of two that turn a tile's V parameters into integers: scale·2^f and shift·2^h, with f and h from each group's largest value.
struct VScales {
    float up[V_GROUPS], down[V_GROUPS];              // 2^f, 2^-f
    float shift_up[V_GROUPS], shift_down[V_GROUPS];  // 2^h, 2^(-14-h)
};

// Reads V's parameters of the tokens t, t + 1 (t even) from a stage; zeros for tokens beyond the sequence, whatever bytes lie there.
template <class Rows> struct StoredV {
    u32 stage;
    int tokens;
    Rows rows;
    VScales v;

    // Returns the two tokens' scales; `shifts` gets their centred shifts (int4 only).
    __device__ __forceinline__ float2 scales(int group, int t, float2& shifts) const {
        bool in0 = t < tokens, in1 = t + 1 < tokens;
        u32 block = stage + block_of(t) * V_STRIDE + V_CODES;
        if constexpr (V_INT4) {
            uint2 x = lds64(block + (group * BLOCK + in_block(t)) * 4);
            float s0 = in0 ? half_float(x.x & 0xffff) : 0.0f, s1 = in1 ? half_float(x.y & 0xffff) : 0.0f;
            shifts = {in0 ? fmaf(8.0f, s0, half_float(x.x >> 16)) : 0.0f, in1 ? fmaf(8.0f, s1, half_float(x.y >> 16)) : 0.0f};
            return {s0, s1};
        } else {
            u32 x = PAGE == 0 ? rows(stage + V_CODES, group, t) : lds32(block + (group * BLOCK + in_block(t)) * 2);
            return {in0 ? half_float(x & 0xffff) : 0.0f, in1 ? half_float(x >> 16) : 0.0f};
        }
    }
    // Computes f and h of every group; all lanes call it together.
    __device__ __forceinline__ void measure(int lane) {
        if constexpr (V_SCHEME == INT8_TENSOR) {
            v.down[0] = exp2i(-14);
        } else {
#pragma unroll
            for (int group = 0; group < V_GROUPS; group++) {
                float2 shift, scale = scales(group, 2 * lane, shift);
                measure(group, scale, shift);
            }
        }
    }
    __device__ __forceinline__ void measure(int group, float2 scale, float2 shift) {
        float largest = bits_float(warp_max(float_bits(fmaxf(scale.x, scale.y))));
        int f = largest == 0.0f ? 0 : 14 - exponent(largest);
        v.up[group] = exp2i(f);
        v.down[group] = exp2i(-f);
        if constexpr (V_INT4) {
            largest = bits_float(warp_max(float_bits(fmaxf(fabsf(shift.x), fabsf(shift.y)))));
            int h = shift_exponent(largest);
            v.shift_up[group] = exp2i(h);
            v.shift_down[group] = exp2i(-14 - h);
        }
    }
    // Two shifts, rounded to 16-bit integers: bytes {hi of t, hi of t + 1, lo of t, lo of t + 1}.
    __device__ __forceinline__ u32 shift_bytes(int group, float2 shift) const {
        u32 x0 = float_bits(fmaf(shift.x, v.shift_up[group], MAGIC)), x1 = float_bits(fmaf(shift.y, v.shift_up[group], MAGIC));
        return __byte_perm(x0, x1, 0x4051);
    }
    // The two scales times 2^f, as they enter the products; `measure` has run.
    __device__ __forceinline__ uint2 scaled(int group, int t, int = 0) const {
        if constexpr (V_SCHEME == INT8_TENSOR) {
            return {t < tokens ? float_bits(16384.0f) : 0, t + 1 < tokens ? float_bits(16384.0f) : 0};
        } else {
            float2 shift, scale = scales(group, t, shift);
            return {float_bits(scale.x * v.up[group]), float_bits(scale.y * v.up[group])};
        }
    }
    __device__ __forceinline__ u32 shifts(int group, int t, int = 0) const {
        float2 shift;
        scales(group, t, shift);
        return shift_bytes(group, shift);
    }
};
// V's parameters that `prepare_v` has converted into `scratch` for the whole warp; the same interface as StoredV.
struct PreparedV {
    u32 scratch;

    __device__ __forceinline__ uint2 scaled(int group, int t, int) const { return lds64(scratch + (group * TILE + t) * 4); }
    __device__ __forceinline__ u32 shifts(int group, int t, int) const { return lds32(scratch + V_GROUPS * TILE * 4 + (group * TILE + t) * 2); }
};

// V's parameters of the lane's own pairs of tokens in registers, read early to hide the latency; the same interface as StoredV.
struct OwnV {
    uint2 scale[V_GROUPS][SCORES / 2];
    u32 shift[V_GROUPS][V_INT4 ? SCORES / 2 : 1];

    template <class Rows> __device__ __forceinline__ void read(const StoredV<Rows>& stored, const Team& team) {
#pragma unroll
        for (int group = 0; group < V_GROUPS; group++)
#pragma unroll
            for (int i = 0; i < SCORES / 2; i++) {
                int t = team.token() + 8 * i + 2 * (team.lane % 4);
                scale[group][i] = stored.scaled(group, t);
                if constexpr (V_INT4) shift[group][i] = stored.shifts(group, t);
            }
    }
    __device__ __forceinline__ uint2 scaled(int group, int, int i) const { return scale[group][i]; }
    __device__ __forceinline__ u32 shifts(int group, int, int i) const { return shift[group][V_INT4 ? i : 0]; }
};

// Converts a tile's V parameters for `PreparedV`; one warp, two tokens per lane.
template <class Rows> DEVICE void prepare_v(StoredV<Rows>& stored, u32 scratch, int lane) {
    if constexpr (V_SCHEME == INT8_TENSOR) {
        uint2 x = stored.scaled(0, 2 * lane);
        sts64(scratch + 2 * lane * 4, bits_float(x.x), bits_float(x.y));
        stored.measure(lane);
    } else {
#pragma unroll
        for (int group = 0; group < V_GROUPS; group++) {
            float2 shift, scale = stored.scales(group, 2 * lane, shift);
            stored.measure(group, scale, shift);
            sts64(scratch + (group * TILE + 2 * lane) * 4, scale.x * stored.v.up[group], scale.y * stored.v.up[group]);
            if constexpr (V_INT4) sts32(scratch + V_GROUPS * TILE * 4 + (group * TILE / 2 + lane) * 4, stored.shift_bytes(group, shift));
        }
    }
    __syncwarp();
}

// Loads dims 8j to 8j + 7 of V as right operands: b[panel] has bytes 4·(lane%4) + {0..3}, in slot order, of dim lane/4 in a panel of 16 tokens.
DEVICE void load_v8(u32 stage, int j, int lane, u32 (&b)[4], int rows = HEAD_DIM) {
    constexpr int IN_BLOCK = BLOCK / 16;
    int panel = lane / 8;
    ldmatrix_x4(b, stage + panel / IN_BLOCK * V_STRIDE + (panel % IN_BLOCK * rows + 8 * j + lane % 8) * 16);
}
// The same for 16 dims of token-major V, whose 16-byte rows run along the dims: b[0] has the even dims, b[1] the odd ones.
DEVICE void load_v_rows(u32 stage, int j, int lane, u32 (&b)[2][4]) {
    u32 x[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++)
        ldmatrix_x4_trans(x[half], chunk_at<V_SWIZZLE>(stage, j / 2, 0, 32 * half + lane));
#pragma unroll
    for (int panel = 0; panel < 4; panel++) {
        u32 low = x[panel / 2][2 * panel % 4], high = x[panel / 2][2 * panel % 4 + 1];
        b[0][panel] = __byte_perm(low, high, 0x6420);
        b[1][panel] = __byte_perm(low, high, 0x7531);
    }
}

// The weights of one row group as left operand: two planes of bytes, hi in rows 0 to 7, lo in rows 8 to 15.
struct Weights {
    u32 plane[4][2];  // (panel of 16 tokens, {hi, lo})
    Sums centre;      // int4: -128·Σhi (twice), -128·Σlo (twice): initial accumulators of the high nibbles
    int low;          // int4: -136·Σ w16
    float shift;      // int4: Σ p·shift
};

// Computes both planes of w16 (weight times scale) for the warp's `panel`-th panel of 16 tokens.
template <class Params> DEVICE void weigh_panel(const float (&p)[SCORES], int panel, const Params& params, int group, const Team& team, u32 (&plane)[2]) {
    u32 x[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint2 scale = params.scaled(group, team.token() + 16 * panel + 8 * h + 2 * (team.lane % 4), 2 * panel + h);
        const float* q = &p[4 * panel + 2 * h];
        x[2 * h] = float_bits(q[0] * bits_float(scale.x) + 8388608.0f);
        x[2 * h + 1] = float_bits(q[1] * bits_float(scale.y) + 8388608.0f);
    }
    u32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    plane[0] = __byte_perm(a, b, 0x7632);
    plane[1] = __byte_perm(a, b, 0x5410);
}
// Σ p14·sh over the lane's tokens: x for the high bytes of the shifts, y for the low bytes.
template <class Params> DEVICE int2 shift_sums(const u32 (&p14)[V_INT4 ? SCORES / 2 : 1], const Params& params, int group, const Team& team) {
    int hi = 0, lo = 0;
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
        u32 shifts = params.shifts(group, team.token() + 8 * i + 2 * (team.lane % 4), i);
        hi = dot2_s8_low(p14[i % (V_INT4 ? SCORES / 2 : 1)], shifts, hi);
        lo = dot2_u8_high(p14[i % (V_INT4 ? SCORES / 2 : 1)], shifts, lo);
    }
    return {hi, lo};
}
// Sets the terms that int4 needs besides the planes, which must be complete: see Weights.
DEVICE void centre(Weights& w, int hi, int lo, float shift_down) {
    Sums k = {};
    k = mma_u8s8_k32(k, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], 0x80808080u, 0x80808080u);
    k = mma_u8s8_k32(k, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], 0x80808080u, 0x80808080u);
    w.centre = k;
    w.low = (k.x[0] * 256 + k.x[2]) / 16 * 17;
    w.shift = fmaf((float)hi, 256.0f, (float)lo) * shift_down;
}
// Computes the weights of one row group in one group of V, where a warp has all tokens of the tile.
DEVICE void weigh(const float (&p)[SCORES], const u32 (&p14)[V_INT4 ? SCORES / 2 : 1], u32 scratch, int group, const VScales& v, const Team& team,
                  Weights& w) {
    PreparedV params = {scratch};
#pragma unroll
    for (int panel = 0; panel < SCORES / 4; panel++) weigh_panel(p, panel, params, group, team, w.plane[panel]);
    if constexpr (V_INT4) {
        int2 sums = shift_sums(p14, params, group, team);
        centre(w, quad_sum(sums.x), quad_sum(sums.y), v.shift_down[group]);
    }
}
// Publishes the weights of this warp's tokens in all groups of V, where the warps of a team share a tile.
template <class Params> DEVICE void publish_weights(const float (&p)[ROW_GROUPS][SCORES], const Pairs& pairs, const Rescale& r, const Params& params, const Team& team) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
#pragma unroll
        for (int group = 0; group < V_GROUPS; group++) {
            u32 plane[2];
            weigh_panel(p[g], 0, params, group, team, plane);
            sts64(team.planes_at(group, g, team.warp), bits_float(plane[0]), bits_float(plane[1]));
            if constexpr (V_INT4) {
                int2 sums = shift_sums(pairs.p14[g], params, group, team);
                team.publish_sum(1 + 2 * group, g, sums.x);
                team.publish_sum(2 + 2 * group, g, sums.y);
            }
        }
        team.publish_sum(0, g, r.weights[g]);
    }
}
// Collects the weights that all warps of the team published, for one row group in one group of V.
DEVICE void gather_weights(int group, int g, const VScales& v, const Team& team, Weights& w) {
#pragma unroll
    for (int panel = 0; panel < 4; panel++) {
        uint2 x = lds64(team.planes_at(group, g, panel));
        w.plane[panel][0] = x.x;
        w.plane[panel][1] = x.y;
    }
    if constexpr (V_INT4) {
        float down = v.shift_down[0];
#pragma unroll
        for (int i = 1; i < V_GROUPS; i++) down = i == group ? v.shift_down[i] : down;
        centre(w, team.gather_sum(1 + 2 * group, g), team.gather_sum(2 + 2 * group, g), down);
    }
}

// Multiplies the weights with V of dims 8j to 8j + 7 and folds the scaled integers into O of one row group.
DEVICE void fold8(State& state, int g, int j, const u32 (&b)[4], const Weights& w, float down, const Rescale& r) {
    Sums c = {};
    c = mma_u8s8_k32(c, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], b[0], b[1]);
    c = mma_u8s8_k32(c, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], b[2], b[3]);
#pragma unroll
    for (int i = 0; i < 2; i++)
        state.o[g][j][i] = fmaf((float)(c.x[i] * 256 + c.x[i + 2]), down * r.beta[g], state.o[g][j][i]);
}
// The same for dims 8j to 8j + 15 of 4-bit V: bytes hold dims 8j.. in their low nibbles, 8(j + 1).. in their high ones.
DEVICE void fold4(State& state, int g, int j, const u32 (&whole)[4], const u32 (&high)[4], const Weights& w, float down, const Rescale& r) {
    Sums c = {}, h = w.centre;
    c = mma_u8_k32(c, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], whole[0], whole[1]);
    c = mma_u8_k32(c, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], whole[2], whole[3]);
    h = mma_u8_k32(h, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], high[0], high[1]);
    h = mma_u8_k32(h, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], high[2], high[3]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int of_high = h.x[i] * 256 + h.x[i + 2], of_low = c.x[i] * 256 + c.x[i + 2] - of_high + w.low;
        state.o[g][j][i] = fmaf(fmaf((float)of_low, down, w.shift), r.beta[g], state.o[g][j][i]);
        state.o[g][j + 1][i] = fmaf(fmaf((float)of_high, down * 0.0625f, w.shift), r.beta[g], state.o[g][j + 1][i]);
    }
}

// Rescales O to the new maximum, before the tile is added.
DEVICE void rescale(State& state, const Rescale& r) {
    bool moved = false;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) moved |= r.alpha[g] != 1.0f;
    if (!SHARES_TILES && !__any_sync(~0u, moved)) return;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int j = 0; j < DIMS / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) state.o[g][j][i] = state.o[g][j][i] * r.alpha[g];
}

// Folds the tile's values into the state, whose O has been rescaled. weigh(n, g, w) sets the weights of row group g in the warp's n-th group
// of V.
template <class Weigh> DEVICE void fold_groups(u32 stage, const VScales& v, const Rescale& r, const Team& team, State& state, Weigh weigh) {
#pragma unroll
    for (int n = 0; n < Team::GROUPS; n++) {
        float down = v.down[SHARES_TILES ? 0 : n];
        if constexpr (SHARES_TILES) {
#pragma unroll
            for (int i = 1; i < V_GROUPS; i++) down = i == team.group() + n ? v.down[i] : down;
        }
        Weights w[ROW_GROUPS];
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) weigh(n, g, w[g]);
        constexpr int TILES = DIMS / 8 / Team::GROUPS;
#pragma unroll
        for (int j = n * TILES; j < (n + 1) * TILES; j += 2) {
            u32 b[2][4];
            int of_tile = team.dim() / 8 + j;
            if constexpr (V_INT4) {
                load_v8(stage, of_tile / 2, team.lane, b[0], HEAD_DIM / 2);
#pragma unroll
                for (int i = 0; i < 4; i++) b[1][i] = high_nibbles(b[0][i]);
#pragma unroll
                for (int g = 0; g < ROW_GROUPS; g++) fold4(state, g, j, b[0], b[1], w[g], down, r);
                continue;
            }
            if constexpr (V_TOKEN_MAJOR) {
                load_v_rows(stage, of_tile, team.lane, b);
            } else {
                load_v8(stage, of_tile, team.lane, b[0]);
                load_v8(stage, of_tile + 1, team.lane, b[1]);
            }
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) {
                fold8(state, g, j, b[0], w[g], down, r);
                fold8(state, g, j + 1, b[1], w[g], down, r);
            }
        }
    }
}

// Folds a tile that a warp attends alone; `prepare_v` has converted V's parameters.
DEVICE void fold_prepared(u32 stage, u32 scratch, const VScales& v, const float (&p)[ROW_GROUPS][SCORES], const Pairs& pairs, const Rescale& r,
                          const Team& team, State& state) {
    rescale(state, r);
    fold_groups(stage, v, r, team, state, [&](int n, int g, Weights& w) { weigh(p[g], pairs.p14[g], scratch, n, v, team, w); });
}

// Folds a tile that the warps of a team share, from the weights and sums that all of them have published.
DEVICE void fold_gathered(u32 stage, const VScales& v, const Rescale& r, const Team& team, State& state) {
    rescale(state, r);
    fold_groups(stage, v, r, team, state, [&](int n, int g, Weights& w) { gather_weights(team.group() + n, g, v, team, w); });
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) add_weights(state, g, team.gather_sum(0, g), r);
}

// ---- Float V: weights as two planes of V's precision (f16 for fp8) ----

// A pair of elements of tokens t and t + 1, with 0 for a token beyond the sequence: its bytes may be a NaN, and 0·NaN is not 0.
DEVICE u32 cached(u32 pair, int t, int tokens) { return t + 1 < tokens ? pair : t < tokens ? pair & 0xffff : 0; }

// Loads 16 dims of V as right operands of two MMAs of 8 dims: b[MMA][panel of 16 tokens][pair of tokens].
DEVICE void load_float_v(u32 stage, int j, int tokens, int lane, u32 (&b)[2][4][2]) {
    if constexpr (V_SCHEME == FP8) {
        u32 x[2][4];
        if constexpr (V_TOKEN_MAJOR) {
            load_v_rows(stage, j, lane, x);
        } else {
            load_v8(stage, j, lane, x[0]);
            load_v8(stage, j + 1, lane, x[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int panel = 0; panel < 4; panel++) e4m3_pairs(x[i][panel], b[i][panel][0], b[i][panel][1]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 x[4];
                int t = 32 * half + lane;
                if (PAGE == 0) ldmatrix_x4_trans(x, chunk_at<V_SWIZZLE>(stage, j + i, 0, t));
                else ldmatrix_x4_trans(x, stage + t / BLOCK * V_STRIDE + ((j + i) * BLOCK + t % BLOCK) * 16);
#pragma unroll
                for (int k = 0; k < 4; k++) b[i][2 * half + k / 2][k % 2] = x[k];
            }
    }
    if (tokens < TILE) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int panel = 0; panel < 4; panel++)
#pragma unroll
                for (int k = 0; k < 2; k++) b[i][panel][k] = cached(b[i][panel][k], 16 * panel + 8 * k + 2 * (lane % 4), tokens);
    }
}

// Splits the weights of the warp's `panel`-th panel of 16 tokens into hi and lo planes.
DEVICE void split_weights(const float (&p)[SCORES], int panel, u32 (&w)[4]) {
#pragma unroll
    for (int k = 0; k < 2; k++) split_pair<V_SCHEME == BF16>(p[4 * panel + 2 * k], p[4 * panel + 2 * k + 1], w[2 * k], w[2 * k + 1]);
}
// Multiplies the weights with float V and folds the products into the state.
DEVICE void fold_floats(u32 stage, int tokens, const u32 (&w)[ROW_GROUPS][4][4], const Rescale& r, const Team& team, State& state) {
    rescale(state, r);
#pragma unroll
    for (int j = 0; j < DIMS / 8; j += 2) {
        u32 b[2][4][2];
        load_float_v(stage, team.dim() / 8 + j, tokens, team.lane, b);
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                FloatSums c = {};
#pragma unroll
                for (int panel = 0; panel < 4; panel++) {
                    const u32* a = w[g][panel];
                    if constexpr (V_SCHEME == BF16) c = mma_bf16(c, a[0], a[1], a[2], a[3], b[i][panel][0], b[i][panel][1]);
                    else c = mma_f16(c, a[0], a[1], a[2], a[3], b[i][panel][0], b[i][panel][1]);
                }
#pragma unroll
                for (int k = 0; k < 2; k++) state.o[g][j + i][k] = fmaf(c.x[k] + c.x[k + 2], r.beta[g], state.o[g][j + i][k]);
            }
    }
}

// Folds a tile of float V that a warp attends alone.
DEVICE void fold_float_values(u32 stage, int tokens, const float (&p)[ROW_GROUPS][SCORES], const Rescale& r, const Team& team, State& state) {
    u32 w[ROW_GROUPS][4][4];
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int panel = 0; panel < SCORES / 4; panel++) split_weights(p[g], panel, w[g][panel]);
    fold_floats(stage, tokens, w, r, team, state);
}

// Publishes the weights of this warp's tokens, where the warps of a team share a tile of float V.
DEVICE void publish_float_weights(const float (&p)[ROW_GROUPS][SCORES], const Rescale& r, const Team& team) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        u32 w[4];
        split_weights(p[g], 0, w);
        sts128(team.planes_at(0, g, team.warp), {bits_float(w[0]), bits_float(w[1]), bits_float(w[2]), bits_float(w[3])});
        team.publish_sum(0, g, r.weights[g]);
    }
}
// Folds a tile of float V that the warps of a team share, from the weights that all of them have published.
DEVICE void fold_gathered_floats(u32 stage, int tokens, const Rescale& r, const Team& team, State& state) {
    u32 w[ROW_GROUPS][4][4];
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        add_weights(state, g, team.gather_sum(0, g), r);
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
            float4 x = lds128(team.planes_at(0, g, panel));
            w[g][panel][0] = float_bits(x.x);
            w[g][panel][1] = float_bits(x.y);
            w[g][panel][2] = float_bits(x.z);
            w[g][panel][3] = float_bits(x.w);
        }
    }
    fold_floats(stage, tokens, w, r, team, state);
}
