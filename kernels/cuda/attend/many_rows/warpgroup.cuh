// The rows of a warpgroup of many_rows.cu: which tokens they see, and the state of a segment. A thread has two rows and every fourth pair
// of tokens, or dims. Of few rows it has one: products then have 64 rows as ever, of which each second group of eight means nothing, and all warps have rows.
#pragma once
#include "common/ptx.cuh"
#if ATTN_BULK
#include "common/wgmma.cuh"
#else
#include "common/warp_products.cuh"
#endif
#include "attend/many_rows/loaded_rows.cuh"
#include "attend/many_rows/producer.cuh"
#include "attend/merge.cuh"
#include "attend/query_rows.cuh"

namespace attn {

constexpr int SIDE_BYTES = Config::UNPACKS ? Config::UNPACKED_BYTES : Stage::BYTES;  // of the stages that floats are read from
static_assert(INTEGER || Config::IS_WIDE || (Config::UNPACKS ? Config::UNPACKED_STAGES : Config::STAGES) % 2 == 0,
              "a tile's stages lie side by side: select.rs");
constexpr int SUMS_OF_TILE = TILE / 2, ELEMENTS = Config::PART_DIMS / 2;  // of a thread: scores, and dims of O
constexpr int WARPGROUP_DIMS = Config::PART_DIMS * Config::V_PARTS;       // of V
constexpr int THREAD_ROWS = Config::WARPGROUP_ROWS / 32;                 // of the two that a thread has of products
static_assert(THREAD_ROWS == 2 || (THREAD_ROWS == 1 && INTEGER), "select.rs");
constexpr int TEAM_BARRIER = 1;                                          // the first of the teams' named barriers
constexpr int WARPGROUP_BARRIER = TEAM_BARRIER + Config::WARPGROUPS;     // of the warpgroups'
constexpr int WEIGHTS_BARRIER = WARPGROUP_BARRIER + Config::WARPGROUPS;  // the first of those where a warpgroup waits for the other's weights (many_rows/paired_floats.cuh)

// Whether element i of a thread's products is one of its rows'.
DEVICE constexpr bool is_of_row(int i) { return i / 2 % 2 < THREAD_ROWS; }

// A thread's rows of a work item: warp row lane/4, and that + 8.
struct ThreadRows {
    int start[2], end[2];  // tokens that a row sees
    int position[2], tile[2];
    float slope[2];
    float scale[2];  // of scores
    float ratio[2];  // of queries with two parts: the second part's scale in the first one's
    float base[2][2];  // what scores count from on the grid: of the first tile, and of all later ones
    int sum[2];  // Q, of queries in integers
    int all_start, all_end;  // tokens that all of the warp's rows see; where warps multiply for themselves, registers are few, and lanes vote

    // Of a tile's scores.
    METHOD float base_of(int h, int index) const { return !HAS_CENTRES ? SCORE_BASE : index == 0 ? base[0][h] : base[1][h]; }
    METHOD bool sees(int h, int t) const { return t >= start[h] && t < end[h]; }
    METHOD bool sees_some(int h, int t0) const { return max(start[h], t0) < min(end[h], t0 + TILE); }
    METHOD bool see_all(int t0, int tokens = TILE) const {
        if (ATTN_BULK) return all_start <= t0 && t0 + tokens <= all_end;
        bool full = true;
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) full &= start[h] <= t0 && t0 + tokens <= end[h];
        return __all_sync(~0u, full);
    }
};

struct Warpgroup {
    const DecodeParams& p;
    Ring ring;
    UnpackedRing unpacked;
    RowBuffers buffers;
    u32 queries;  // shared addresses
    u32 thresholds;  // of integers
    u32 scales;  // of integers: the warp's room for V's scales of a tile
    u32 state;  // of integers: the thread's elements of a span's state, 2048 bytes apart; of wide rows SpanMemory
    float4* row_state;  // in the workspace, 128 apart
    int warpgroup, warp, lane;  // `warp`: of the warpgroup
    int first_row;  // of the warp in its work item
    bool has_rows;  // whether some of the warp's rows are no padding
    ThreadRows rows;
    float m[2], l[2], o[ELEMENTS];

    // Whether the warp takes part in products: without wgmma it multiplies for itself alone.
    METHOD bool multiplies() const { return ATTN_BULK || has_rows; }
    // A shared address is the same for all lanes, which the compiler does not see: it would find descriptions of matrices in every lane, and keep them.
    DEVICE u32 same_for_all(u32 at) { return ATTN_BULK ? __shfl_sync(~0u, opaque(at), 0) : opaque(at); }
    DEVICE int token_of(int j, int e, int lane) { return 8 * j + 2 * (lane % 4) + e; }

    METHOD void find_rows(const WorkRange& range, const QueryBlock& queries_of) {
        int first = first_position(p, queries_of, range.kv_len);
        int first_of_warp = range.row_block * Config::ROWS + first_row;
        has_rows = __any_sync(~0u, first_of_warp < p.heads_per_kv * queries_of.tokens);
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            SeenTokens seen = seen_tokens(p, queries_of, range.kv_head, range.kv_len, first, first_of_warp + lane / 4 + 8 * h);
            rows.start[h] = seen.start;
            rows.end[h] = seen.end;
            rows.slope[h] = seen.slope;
            rows.position[h] = seen.position;
            rows.tile[h] = seen.tile;
        }
        if (!ATTN_BULK) return;
        rows.all_start = warp_max(max(rows.start[0], rows.start[THREAD_ROWS - 1]));
        rows.all_end = warp_min(min(rows.end[0], rows.end[THREAD_ROWS - 1]));
    }

    // Products with queries that were loaded ahead are done.
    METHOD void release_rows() { buffers.pass_on(buffers.empty(), lane); }

    // Of the threads that attend the same rows.
    METHOD void team_barrier() const { barrier_of<Config::MERGE_THREADS>(TEAM_BARRIER + warpgroup / Config::TEAM_WARPGROUPS); }

    METHOD void clear() {
        m[0] = m[1] = MINUS_INFINITY;
        l[0] = l[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) o[i] = 0.0f;
    }

    // Calls hide(i) for the scores of tokens that a row does not see.
    template <class Hide> METHOD void each_hidden(int index, Hide hide) const {
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++)
            if (is_of_row(i) && !rows.sees(i / 2 % 2, index * TILE + token_of(i / 4, i % 2, lane))) hide(i);
    }
    // The largest of a row's numbers: of those that the thread has, and of all.
    METHOD float thread_max(const float (&s)[SUMS_OF_TILE], int h) const {
        float x[4] = {s[2 * h], s[2 * h + 1], s[2 * h + 4], s[2 * h + 5]};
#pragma unroll
        for (int j = 2; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) x[j % 2 * 2 + e] = fmaxf(x[j % 2 * 2 + e], s[4 * j + 2 * h + e]);
        return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    }
    METHOD float row_max(const float (&s)[SUMS_OF_TILE], int h) const { return quad_max(thread_max(s, h)); }
    // The same in half as many instructions where some of the row's numbers are positive; else a number that is not.
    METHOD float row_max_of_positive(const float (&s)[SUMS_OF_TILE], int h) const {
        float x[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
        for (int j = 1; j < TILE / 8; j++) x[j % 2] = largest_of_positive(x[j % 2], s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
        return quad_max_of_positive(largest_of_positive(x[0], x[1], x[1]));
    }
    // Soft cap and ALiBi.
    METHOD void modify_scores(float (&s)[SUMS_OF_TILE], int index) const {
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) {
            if (!is_of_row(i)) continue;
            int h = i / 2 % 2, t = index * TILE + token_of(i / 4, i % 2, lane);
            if (p.softcap_inner != 0.0f) s[i] = softcap(s[i], p.softcap_inner, p.softcap_outer);
            if (p.alibi_slopes) s[i] = s[i] + rows.slope[h] * (float)(t - rows.position[h]);
        }
    }

    // ---- states ----

    // The elements of a thread's rows by vectors: the n-th of the i-th.
    static constexpr int VECTORS = ELEMENTS * THREAD_ROWS / 8;
    DEVICE constexpr int element(int i, int n) { return THREAD_ROWS == 2 ? 4 * i + n : 8 * i + n / 2 * 4 + n % 2; }

    // Merges the state in registers into the one before it, whose elements `load` gives, AT_ONCE of its vectors at once: the result is in registers.
    template <int AT_ONCE, class Load> METHOD void merge_behind(float (&before_m)[2], float (&before_l)[2], Load load) {
        Factors w[2];
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            w[h] = merge_sums(before_m[h], before_l[h], make_float2(m[h], l[h]), false);
            m[h] = before_m[h];
            l[h] = before_l[h];
        }
#pragma unroll
        for (int first = 0; first < VECTORS; first += AT_ONCE) {
            float4 x[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE && first + i < VECTORS; i++) x[i] = load(first + i);
            if (AT_ONCE > 1) __syncwarp();  // ptxas would move loads to where they are needed
#pragma unroll
            for (int i = 0; i < AT_ONCE && first + i < VECTORS; i++) {
                float before[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const int at = element(first + i, n);
                    merge(before[n], o[at], w[at / 2 % 2], false);
                    o[at] = before[n];
                }
            }
        }
    }
    template <class Store> METHOD void store_state(Store store) const {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) store(i, {o[element(i, 0)], o[element(i, 1)], o[element(i, 2)], o[element(i, 3)]});
    }

    // ---- states of rows ----

    // Where the part-th of the warpgroup's dims of V begin in a row.
    METHOD int first_dim(int part) const { return Config::IS_WIDE ? (part * Config::WARPGROUPS + warpgroup) * Config::PART_DIMS : 0; }
    // A span's state, in registers, as a partial.
    METHOD void write_partial(const WorkRange& range, int partial, int part = 0) const {
        WorkItem item = range.item();
        u64 at = (item.index(p) * p.max_partials + partial) * Config::ROWS;
        int count = item.rows(p);
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            int row = first_row + lane / 4 + 8 * h;
            if (row >= count) continue;
            if (lane % 4 == 0) __stcg(p.partial_max_sum + at + row, make_float2(m[h], l[h]));
            float* to = p.partial_o + (at + row) * V_DIM + first_dim(part) + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < ELEMENTS / 4; j++) __stcg((float2*)(to + 8 * j), make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]));
        }
    }
    // Maxima and sums of what the workspace has of rows.
    struct RowState {
        float m[2], l[2];
    };
    METHOD void merge_row(RowState& row, int part = 0) {
        merge_behind<(ELEMENTS > 64 ? 8 : 16)>(row.m, row.l, [&](int i) { return __ldcg(row_state + (part * VECTORS + i) * 128); });
    }
    METHOD void keep_row(RowState& row, int part = 0) const {
        store_state([&](int i, const float4& x) { __stcg(row_state + (part * VECTORS + i) * 128, x); });
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            row.m[h] = m[h];
            row.l[h] = l[h];
        }
    }
};

}  // namespace attn
