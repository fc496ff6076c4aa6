// Sections 2 and 3 of docs/arithmetic.md: a warp's query rows as the right operand of K·Q.
//
// Eight rows are the columns of an MMA: row lane/4 of a row group is column lane/4. A sum's two columns in a lane, 2·(lane%4) and the next,
// are the rows whose scores, weights and outputs the lane has; `of_columns` brings it what the rows' own lanes have computed.
#pragma once
#include "attend/query_rows.cuh"
#include "attend/tile/team.cuh"

namespace attn {

struct Query {
    // Per panel of 16 dims, of row lane/4. Integers: dims 4·(lane%4) + {0, 1, 2, 3}. Floats, as the sum of two parts: the first part of two
    // pairs of dims, then the second part; pairs start at 4·(lane%4) + {0, 2}, or of 16-bit K at 2·(lane%4) + {0, 8}.
    u32 word[ROW_GROUPS][Keys::PANELS][INTEGER ? 1 : 4];
    float scale[ROW_GROUPS][2];  // the step of the lane's columns
    float ratio[ROW_GROUPS][2];  // of rows of two parts: the second part's step in the first one's
    // What scores count from on the grid: of the lane's columns in the first tile, and in all later ones. Where rows or dims are many, registers are short, and a
    // shuffle for each tile spares some: of row lane/4, in even lanes in the first tile, in odd ones in all later ones.
    static constexpr bool SHARES_BASES = ROW_GROUPS > 1 || K_DIM > 128;
    float base[ROW_GROUPS][SHARES_BASES ? 1 : 4];
    // Σ over the dims of a group of K, where its codes or shifts need it.
    int sum[ROW_GROUPS][Keys::GROUPS][2];
    float float_sum[ROW_GROUPS][Keys::GROUPS][2];
};

// What the scores of a tile count from on the grid, by row group and column.
struct ScoreBases {
    float of[ROW_GROUPS][2];

    DEVICE ScoreBases of_tile(const Query& q, bool is_first, int lane) {
        ScoreBases bases;
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if constexpr (!HAS_CENTRES) bases.of[g][e] = SCORE_BASE;
                else if constexpr (Query::SHARES_BASES) bases.of[g][e] = __shfl_sync(~0u, q.base[g][0], 4 * (2 * (lane % 4) + e) + !is_first);
                else bases.of[g][e] = is_first ? q.base[g][e] : q.base[g][2 + e];
            }
        return bases;
    }
};

// Brings a number of row lane/4 to the lanes of its columns.
DEVICE void of_columns(float x, int lane, float (&columns)[2]) {
#pragma unroll
    for (int e = 0; e < 2; e++) columns[e] = __shfl_sync(~0u, x, 4 * (2 * (lane % 4) + e));
}

// `loading()` is called once the row's loads are under way.
template <class Loading> DEVICE Largest load_row(const QueryRow& row, int lane, float (&x)[Keys::PANELS][4], Loading loading) {
    const QueryRow rows[1] = {row};
    float elements[1][Keys::PANELS][4];
    load_elements(rows, lane, elements);
    loading();
#pragma unroll
    for (int panel = 0; panel < Keys::PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[panel][i] = elements[0][panel][i];
    return rotate_row(x, lane);
}

// Section 3: a row in 8 bits, its step, and the sums of its groups.
DEVICE void quantize(Query& q, int g, const float (&x)[Keys::PANELS][4], Largest largest, int lane) {
    QueryStep step = query_step(largest);
    of_columns(step.step, lane, q.scale[g]);
    if constexpr (QUERY_PARTS > 1) of_columns(step.ratio, lane, q.ratio[g]);
#pragma unroll
    for (int panel = 0; panel < Keys::PANELS; panel++) q.word[g][panel][0] = query_codes(x[panel], step.inverse[part_of(panel)]);
    if constexpr (Keys::HAS_SHIFTS || Keys::HAS_HALF_STEPS) {
        constexpr u32 ONES = 0x01010101u;
#pragma unroll
        for (int group = 0; group < Keys::GROUPS; group++) {
            Sums c = {};
#pragma unroll
            for (int p = first_panel(group); p < first_panel(group + 1); p++) c = mma_s8_k16(c, ONES, ONES, q.word[g][p][0]);
            q.sum[g][group][0] = c.x[0];
            q.sum[g][group][1] = c.x[1];
        }
    }
}

// Section 12: what a row's scores count from, by the centres that its keys lack: of the first tile, for who `has_first` of it, and of all later ones.
struct Centres {
    CentreElements first, later;
    bool has_first;

    METHOD void load(const u16* centres, int lane) {
        if constexpr (!HAS_CENTRES) return;
        later.load(centres + K_DIM, lane);
        if (has_first) first.load(centres, lane);
    }
};
DEVICE void find_bases(Query& q, int g, const float (&x)[Keys::PANELS][4], const Centres& centres, int lane) {
    if constexpr (!HAS_CENTRES) return;
    float of_row[2];
    of_row[1] = score_base(x, centres.later);
    of_row[0] = centres.has_first ? score_base(x, centres.first) : of_row[1];
    if constexpr (Query::SHARES_BASES) {
        q.base[g][0] = lane % 2 == 0 ? of_row[0] : of_row[1];
    } else {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float columns[2];
            of_columns(of_row[c], lane, columns);
#pragma unroll
            for (int e = 0; e < 2; e++) q.base[g][2 * c + e] = columns[e];
        }
    }
}

// Floats: a row as the sum of two parts of K's own precision (f16 for fp8 and integers). It is scaled to below 2^14 first, which f16 holds.
DEVICE void quantize_float(Query& q, int g, const float (&x)[Keys::PANELS][4], Largest of_row, int lane) {
    const float largest = of_row.of_part[0];
    int e = largest == 0.0f ? 0 : min(max(13 - exponent(largest), -70), 60);
    float up = exp2i(e), sums[Keys::GROUPS] = {};
    of_columns(exp2i(-e), lane, q.scale[g]);
#pragma unroll
    for (int panel = 0; panel < Keys::PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float a = x[panel][2 * i] * up, b = x[panel][2 * i + 1] * up;
            split_pair<Keys::SCHEME == BF16>(a, b, q.word[g][panel][i], q.word[g][panel][(2 + i) % (INTEGER ? 1 : 4)]);
            sums[panel / GROUP_PANELS] += a + b;
        }
    if constexpr (Keys::HAS_SHIFTS)
#pragma unroll
        for (int group = 0; group < Keys::GROUPS; group++) of_columns(quad_sum(sums[group]), lane, q.float_sum[g][group]);
}

}  // namespace attn
