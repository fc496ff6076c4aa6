// Scores and weights of a tile of many_rows.cu in integers: sections 3 to 5 of docs/arithmetic.md.
#pragma once
#include "attend/many_rows/warpgroup.cuh"

namespace attn {

// Parameters of two neighbouring tokens: of 4 bits the floats of `unpack_params`, else as they lie in a page.
template <int SCHEME> struct PairParams {
    static constexpr bool IS_4 = code_bits(SCHEME) == 4, HAS_SHIFTS = SCHEME == INT4, HAS_SCALES = param_bytes(SCHEME) > 0;
    u32 at;

    METHOD void read(int t, float (&scale)[2], float (&shift)[2]) const {
        if constexpr (HAS_SHIFTS) {
            float4 x = lds128(at + t * 8);
            scale[0] = x.x;
            shift[0] = x.y;
            scale[1] = x.z;
            shift[1] = x.w;
        } else if constexpr (IS_4) {
            uint2 x = lds64(at + t * 4);
            scale[0] = bits_float(x.x);
            scale[1] = bits_float(x.y);
        } else if constexpr (HAS_SCALES) {
            u32 x = lds32(at + t * 2);
            scale[0] = half_float(x & 0xffff);
            scale[1] = half_float(x >> 16);
        }
    }
};

struct IntegerRows : Warpgroup {
    DEVICE void start() {}
    DEVICE void finish() {}

    // The codes of a row's elements in this lane, `at` bytes into the queries; its step and its bases.
    struct RowParams {
        float scale, ratio, base[2];
        int sum;
    };
    METHOD RowParams store_query(float (&x)[Keys::PANELS][4], const u16* centres, u32 at) const {
        RowParams row;
        QueryStep step = query_step(rotate_row(x, lane));
        row.scale = step.step;
        row.ratio = step.ratio;
        int sum = 0;
#pragma unroll
        for (int panel = 0; panel < Keys::PANELS; panel++) {
            u32 word = query_codes(x[panel], step.inverse[part_of(panel)]);
            if (Keys::HAS_SHIFTS || Keys::HAS_HALF_STEPS) sum = signed_byte_sum(word, sum);
            sts32(queries + panel * 64 * 16 + at, word);
        }
        row.sum = Keys::HAS_SHIFTS || Keys::HAS_HALF_STEPS ? quad_sum(sum) : 0;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            row.base[c] = SCORE_BASE;
            if constexpr (HAS_CENTRES) {
                CentreElements centre;
                centre.load(centres + c * K_DIM, lane);
                row.base[c] = score_base(x, centre);
            }
        }
        return row;
    }

    // Bytes of 4-bit codes are 8 (2 code - 15), half of what the codes count in residuals' half steps; residuals then count from 15 half steps below.
    static constexpr float RESIDUAL_BASE = -7.5f;
    // Which of the thread's rows read a tile of a side with residuals, of which it has a window: the first, and those in the window.
    METHOD bool is_fine(int h, int index, int window) const { return rows.tile[h] < index + window || index == 0; }

    // K's parameters of the thread's tokens.
    struct KeyParams {
        float scale[Keys::GROUPS][TILE / 8][2], shift[TILE / 8][2];
    };
    METHOD void read_keys(u32 params, KeyParams& k) const {
#pragma unroll
        for (int group = 0; group < Keys::GROUPS; group++) {
            PairParams<Keys::SCHEME> pairs = {params + group * TILE * param_bytes(Keys::SCHEME)};
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) pairs.read(8 * j + 2 * (lane % 4), k.scale[group][j], k.shift[j]);
        }
    }
    // Sums of a tile, by K's groups.
    using KeySums = int[Keys::GROUPS][SUMS_OF_TILE];
    // Scores from sums of integers; FINE: some row has read K with residuals. Without soft cap and slopes they still are to be multiplied by the row's scale.
    template <bool FINE = false> METHOD void find_scores(const KeySums& sums, int index, const KeyParams& k, float (&s)[SUMS_OF_TILE]) const {
        const bool are_whole = changes_scores(p);
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++)
            if (is_of_row(i)) s[i] = (float)(Keys::HAS_SHIFTS ? sums[0][i] - 8 * rows.sum[i / 2 % 2] : sums[0][i]);
        if (FINE)
#pragma unroll
            for (int h = 0; h < THREAD_ROWS; h++) {
                const float of_residuals = is_fine(h, index, Keys::WINDOW) ? RESIDUAL_BASE * (float)rows.sum[h] : 0.0f;
#pragma unroll
                for (int i = 0; i < SUMS_OF_TILE; i++)
                    if (i / 2 % 2 == h) s[i] = s[i] + of_residuals;
            }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int n = 0; n < 2 * THREAD_ROWS; n++) {
                int h = n / 2, e = n % 2;
                float& x = s[4 * j + n];
                if (Keys::SCHEME != INT8_TENSOR) x = x * k.scale[0][j][e];
                if (QUERY_PARTS > 1) x = x + (float)sums[Keys::GROUPS - 1][4 * j + n] * k.scale[Keys::GROUPS - 1][j][e] * rows.ratio[h];
                if (Keys::HAS_SHIFTS) x = x + (float)rows.sum[h] * k.shift[j][e];
                if (are_whole) x = x * rows.scale[h];
                if (HAS_CENTRES && are_whole) x = x + (rows.base_of(h, index) - SCORE_BASE);
            }
        if (are_whole) modify_scores(s, index);
    }

    // What a tile's weights leave for its values.
    struct Weighed {
        u32 a[2][4];  // bytes in slot order, which are the left operand of products with V
        float exponent[2], total[2], step[2];
        float alpha[2], beta[2];  // once the tile is folded into a state
        float shift[2];  // z
    };
    // The sum of a row's weights, W.
    METHOD int weight_sum(const Weighed& w, int h) const {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) sum = byte_sum(w.a[i / 2][i % 2 * 2 + h], sum);
        return quad_sum(sum);
    }
    // Puts V's scales of a tile on the grid, where that is a step of its own.
    METHOD void prepare_weights(int index, u32 params) const {
        if (GRIDS_SCALES) grid_scales(params, rows.see_all(index * TILE));
    }
    // Finds a tile's weights from its scores. FINE: some row reads V with residuals.
    template <bool FINE = false> METHOD void weigh_tile(float (&x)[SUMS_OF_TILE], int index, u32 params, Weighed& w) const {
        const bool full = __all_sync(~0u, rows.see_all(index * TILE));
        if (__builtin_expect(!full, 0)) each_hidden(index, [&](int i) { x[i] = MINUS_INFINITY; });
        float s[SUMS_OF_TILE], base[2];
        find_points(x, w, index, s, base);
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++)
            if (is_of_row(i)) s[i] = exp2_of_point(s[i] - base[i / 2 % 2]);
        sum_weights(s, w.total);
        float largest[2] = {0.0f, 0.0f};
        scale_weights(s, full, params, largest, w.shift);
        float inverse[2];
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            WeightStep found = weight_step(quad_max_of_positive(largest[h]), FINE && is_fine(h, index, Values::WINDOW));
            inverse[h] = found.inverse;
            w.step[h] = found.step;
        }
        // Tokens 2c, 2c + 1, 2c + 8, 2c + 9 of a panel of 16.
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
            float b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                int j = 2 * panel + i / 2;
                uint2 x = lds64(thresholds + token_of(j, 0, lane) * 4);
                float threshold[2] = {bits_float(x.x), bits_float(x.y)};
#pragma unroll
                for (int n = 0; n < 2 * THREAD_ROWS; n++) b[n / 2][i + n % 2] = fmaf(s[4 * j + n], inverse[n / 2], threshold[n % 2]);
            }
#pragma unroll
            for (int h = 0; h < THREAD_ROWS; h++) {
                u32 word = weight_bytes(b[h][0], b[h][1], b[h][2], b[h][3]);
                w.a[panel / 2][panel % 2 * 2 + h] = word;
            }
        }
    }
    // Turns scores into points of the grid, which count from `base`, and finds a tile's exponents by its largest score. Scores of a row beyond the grid's range
    // become differences from their largest, rounded up.
    METHOD void find_points(float (&x)[SUMS_OF_TILE], Weighed& w, int index, float (&s)[SUMS_OF_TILE], float (&base)[2]) const {
        // Points are found ahead of their largest where registers suffice for both: its search takes half as many instructions then.
        constexpr bool POINTS_FIRST = ATTN_BULK;
        float step[2], grid[2];
        bool near[2];
        auto find = [&](int h) {
#pragma unroll
            for (int i = 0; i < SUMS_OF_TILE; i++)
                if (i / 2 % 2 == h) s[i] = fmaf(x[i], step[h], grid[h]);
        };
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            step[h] = changes_scores(p) ? 1.0f : rows.scale[h];
            grid[h] = changes_scores(p) ? SCORE_BASE : rows.base_of(h, index);
            if (POINTS_FIRST) find(h);
            // The largest point is that of the largest score: rounding keeps the order.
            const float top = POINTS_FIRST ? row_max_of_positive(s, h) : fmaf(row_max(x, h), step[h], grid[h]), ceil = grid_ceil(top);
            near[h] = is_near(top);
            base[h] = near[h] ? ceil + WEIGHT_SHIFT : SCORE_BASE;  // hidden scores are -inf: their weights are zeros
            w.exponent[h] = near[h] ? ceil - SCORE_BASE + WEIGHT_SHIFT : MINUS_INFINITY;
        }
        if (__builtin_expect(!__all_sync(~0u, near[0] && near[THREAD_ROWS - 1]), 0))
#pragma unroll
            for (int h = 0; h < THREAD_ROWS; h++) {
                const bool far = !near[h] && rows.sees_some(h, index * TILE);
                if (!__any_sync(~0u, far)) continue;
                const float largest = row_max(x, h), of_centre = grid[h] - SCORE_BASE, ceil = ceilf(largest * step[h] + of_centre);
                if (!far || largest == MINUS_INFINITY) continue;
#pragma unroll
                for (int i = 0; i < SUMS_OF_TILE; i++)
                    if (i / 2 % 2 == h) x[i] = fmaxf((x[i] * step[h] + of_centre) - ceil, -65536.0f);
                step[h] = 1.0f;
                grid[h] = SCORE_BASE;
                base[h] = SCORE_BASE + WEIGHT_SHIFT;
                w.exponent[h] = ceil + WEIGHT_SHIFT;
                if (POINTS_FIRST) find(h);
            }
        if (!POINTS_FIRST)
#pragma unroll
            for (int h = 0; h < THREAD_ROWS; h++) find(h);
    }
    // The sums of weights, by products of f16 with ones, which are exact.
    METHOD void sum_weights(const float (&p)[SUMS_OF_TILE], float (&sum)[2]) const {
        constexpr u32 ONES = 0x3C003C00u;
        FloatSums c = {};
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i += 8) {
            u32 second[2] = {};
            if (THREAD_ROWS == 2)
#pragma unroll
                for (int k = 0; k < 2; k++) second[k] = f16_pair(p[i + 4 * k + 2], p[i + 4 * k + 3]);
            c = mma_f16(c, f16_pair(p[i], p[i + 1]), second[0], f16_pair(p[i + 4], p[i + 5]), second[1], ONES, ONES);
        }
        sum[0] = c.x[0];
        sum[1] = c.x[2];
    }
    // Whether V's scales come as they lie in a page: each warp then puts a tile's on the grid once, two in a lane.
    static constexpr bool GRIDS_SCALES = Values::HAS_PARAMS && code_bits(Values::SCHEME) == 8;
    METHOD void grid_scales(u32 params, bool exist) const {
        u32 x = lds32(params + lane * 4);
        float scale[2] = {grid_scale(half_float(x & 0xffff)), grid_scale(half_float(x >> 16))};
        if (!exist)
#pragma unroll
            for (int e = 0; e < 2; e++) scale[e] = finite_scale(scale[e]);
        __syncwarp();  // all lanes have read those of the tile before
        sts64(scales + lane * 8, scale[0], scale[1]);
        __syncwarp();
    }
    // Products of weights with V's scales, the largest of each row, and the sums with V's shifts.
    METHOD void scale_weights(float (&s)[SUMS_OF_TILE], bool exist, u32 params, float (&largest)[2], float (&shifts)[2]) const {
        PairParams<Values::SCHEME> v = {params};
        float z[2][2] = {};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            float scale[2] = {1.0f, 1.0f}, shift[2];
            if constexpr (GRIDS_SCALES) {
                uint2 x = lds64(scales + token_of(j, 0, lane) * 4);
                scale[0] = bits_float(x.x);
                scale[1] = bits_float(x.y);
            } else {
                v.read(token_of(j, 0, lane), scale, shift);
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (Values::HAS_PARAMS && !GRIDS_SCALES && !exist) scale[e] = finite_scale(scale[e]);
                if (Values::HAS_SHIFTS && !exist) shift[e] = finite(shift[e]);
#pragma unroll
                for (int h = 0; h < THREAD_ROWS; h++) {
                    float& x = s[4 * j + 2 * h + e];
                    if (Values::HAS_SHIFTS) z[h][e] = z[h][e] + half_float(float_half(x)) * shift[e];
                    if (Values::HAS_PARAMS) x = x * scale[e];
                }
            }
#pragma unroll
            for (int h = 0; h < THREAD_ROWS; h++) largest[h] = largest_of_positive(largest[h], s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
        }
        if (Values::HAS_SHIFTS)
#pragma unroll
            for (int h = 0; h < THREAD_ROWS; h++) shifts[h] = quad_sum(z[h][0] + z[h][1]);
    }
};

}  // namespace attn
