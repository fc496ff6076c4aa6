// Merging two states, and the epilogue: from a merged state to out and lse.
#pragma once
#include "attend/query_blocks.cuh"
#include "page/rotation.cuh"
#include "common/arithmetic.cuh"
#include "common/dtype.cuh"

namespace attn {

constexpr int ROW_VECTORS = V_DIM / 4;   // float4s of a row

// The factors of a merge to the exponent `top`, the larger one. An empty side has O = +0 and factor -0: adding it changes nothing, not even a zero's sign.
DEVICE Factors merge_factors(float m, float m_b, float top) {
    bool empty = m == MINUS_INFINITY, b_empty = m_b == MINUS_INFINITY;
    return {empty ? (b_empty ? 0.0f : -0.0f) : pow2(m - top), b_empty ? -0.0f : pow2(m_b - top)};
}
// Merges, or folds a tile whose value was kept as a state: the exponent and the sum.
DEVICE Factors merge_sums(float& m, float& l, float2 b, bool is_fold) {
    Factors w;
    if (is_fold) {
        w = fold_factors(m, b.x);
        l = fmaf(b.y, w.beta, l * w.alpha);
    } else {
        float top = fmaxf(m, b.x);
        w = merge_factors(m, b.x, top);
        m = top;
        l = l * w.alpha + b.y * w.beta;
    }
    return w;
}
// `merge` of docs/arithmetic.md, or `fold` of a tile whose value was kept as a state: they round alike but for subnormals.
DEVICE void merge(float& a, float b, const Factors& w, bool is_fold) { a = is_fold ? fmaf(b, w.beta, a * w.alpha) : a * w.alpha + b * w.beta; }
DEVICE void merge(float2& a, const float2& b, const Factors& w, bool is_fold) {
    merge(a.x, b.x, w, is_fold);
    merge(a.y, b.y, w, is_fold);
}
DEVICE void merge(float4& a, const float4& b, const Factors& w, bool is_fold) {
    if (is_fold) {
        a = {fmaf(b.x, w.beta, a.x * w.alpha), fmaf(b.y, w.beta, a.y * w.alpha), fmaf(b.z, w.beta, a.z * w.alpha), fmaf(b.w, w.beta, a.w * w.alpha)};
    } else {
        a = {a.x * w.alpha + b.x * w.beta, a.y * w.alpha + b.y * w.beta, a.z * w.alpha + b.z * w.beta, a.w * w.alpha + b.w * w.beta};
    }
}

// The kinds of partials: states of spans; states of segments, which merge into spans; values of tiles, which fold into segments.
enum Level { SPAN_STATES, SEGMENT_STATES, TILE_VALUES };

// One (query block, KV head, row block).
struct WorkItem {
    int b, kv_head, row_block, num_partials;
    Level level;  // of the partials

    METHOD u64 index(const DecodeParams& p) const { return ((u64)b * p.num_kv_heads + kv_head) * p.row_blocks + row_block; }
    // Rows of the block without padding.
    METHOD int rows(const DecodeParams& p) const { return min(Config::ROWS, p.heads_per_kv * query_block(p, b).tokens - row_block * Config::ROWS); }
    // The sink of a row's query head, or -inf without.
    METHOD float sink(const DecodeParams& p, int row) const {
        if (!p.sinks) return MINUS_INFINITY;
        int r = row_block * Config::ROWS + row, i = (u32)r / p.heads_per_kv_divmod;
        return p.sinks[kv_head * p.heads_per_kv + r - i * p.heads_per_kv];
    }
    // The row's place in Q, out and lse, or -1.
    METHOD long long row(const DecodeParams& p, int row) const {
        int r = opaque(row_block * Config::ROWS + row);
        QueryBlock queries = query_block(p, b);
        if (r >= p.heads_per_kv * queries.tokens) return -1;
        int i = (u32)r / p.heads_per_kv_divmod, head = kv_head * p.heads_per_kv + r - i * p.heads_per_kv;
        return (long long)(queries.first + i) * p.num_q_heads + head;
    }
};

// Where a row's (max, sum) of a partial lies, and O in as many rows: in the workspace, or among the spans of the caller's rows, where a row that
// only fills up the block has none: -1.
DEVICE long long partial_place(const DecodeParams& p, const WorkItem& item, int partial, int row) {
    if constexpr (!Config::LEAVES_SPANS) return (item.index(p) * p.max_partials + partial) * Config::ROWS + row;
    long long at = item.row(p, row);
    return at < 0 ? -1 : (long long)partial * p.span_rows + at;
}

struct Epilogue {
    u8* out;  // the row, or null
    float* lse;
    float scale, tensor, sink;
    int dtype;

    DEVICE Epilogue at(const DecodeParams& p, const WorkItem& item, int row) {
        long long at = item.row(p, row);
        if (at < 0) return {};
        float tensor = p.v_tensor_scales ? p.v_tensor_scales[item.kv_head] : 1.0f;
        return {row_at(p.out, at, V_DIM, p.dtype), p.lse ? p.lse + at : nullptr, 0.0f, tensor, item.sink(p, row), p.dtype};
    }
    // Merges the sink, and writes the log-sum-exp if this is the row's first thread. Nothing seen: O is +0, and so is the result.
    METHOD void begin(float m, float l, bool first) {
        float alpha = 1.0f;
        if (sink > MINUS_INFINITY) alpha = merge_sink(sink, m, l);
        bool some = m > MINUS_INFINITY;
        if (first && lse) *lse = some ? log_sum(m, l) : MINUS_INFINITY;
        scale = some ? rcp(l) * alpha : 1.0f;
    }
    // That of another lane, to write its row.
    METHOD Epilogue of_lane(int lane) const {
        const u32 low = __shfl_sync(~0u, (u32)(u64)out, lane), high = __shfl_sync(~0u, (u32)((u64)out >> 32), lane);
        return {(u8*)((u64)high << 32 | low), nullptr, __shfl_sync(~0u, scale, lane), __shfl_sync(~0u, tensor, lane), 0.0f, __shfl_sync(~0u, dtype, lane)};
    }
    METHOD float4 of(const float4& o) const { return {o.x * scale * tensor, o.y * scale * tensor, o.z * scale * tensor, o.w * scale * tensor}; }
    METHOD float of(float o) const { return o * scale * tensor; }
    // Vectors lane, lane + LANES, … of a finished row, by LANES neighbouring threads; all threads of the warp call it together.
    template <int LANES, int N> METHOD void write_row(float (&x)[N][4], int lane) const {
        if constexpr (Values::IS_ROTATED) rotate_back<Values, LANES>(x, lane);
        if (!out) return;
        auto write = [&](int type) {
#pragma unroll
            for (int k = 0; k < N; k++)
                if (lane + k * LANES < ROW_VECTORS) store_four(out, type, 4 * (lane + k * LANES), {x[k][0], x[k][1], x[k][2], x[k][3]});
        };
        if (dtype == Dtype::F32) write(Dtype::F32);  // decided once: for short items that counts
        else write(dtype);
    }
    // The same of a state's vectors.
    template <int LANES, int N> METHOD void write_vectors(const float4 (&o)[N], int lane) const {
        float x[N][4];
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float4 y = of(o[k]);
            x[k][0] = y.x;
            x[k][1] = y.y;
            x[k][2] = y.z;
            x[k][3] = y.w;
        }
        write_row<LANES>(x, lane);
    }
    // The same of a state in shared memory.
    template <int LANES> METHOD void write_state(u32 state, int lane) const {
        constexpr int N = (ROW_VECTORS + LANES - 1) / LANES;
        float4 o[N];
#pragma unroll
        for (int k = 0; k < N; k++) o[k] = lds128(state + 16 * min(lane + k * LANES, ROW_VECTORS - 1));
        write_vectors<LANES>(o, lane);
    }
    // Turns back a row that lies in shared memory, a word to each lane and 32 dims apart, and writes those 32 dims whose number is `first`,
    // first + step, …; several warps may share the row.
    METHOD void write_rotated(u32 row, int first, int step, int lane) const {
        constexpr int COLUMNS = (V_DIM + 31) / 32;
        float x[COLUMNS][1];
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) x[k][0] = bits_float(lds32(row + k * 128));
        rotate_back<Values, 32>(x, lane);
#pragma unroll
        for (int k = 0; k < COLUMNS; k++)
            if ((k - first) % step == 0 && k * 32 + lane < V_DIM) write_final(k * 32 + lane, x[k][0]);
    }
    // Some elements of a row that is not rotated.
    METHOD void write(int vector, const float4& o) const {
        if (out) store_four(out, dtype, 4 * vector, of(o));
    }
    METHOD void write(int pair, const float2& o) const {
        if (out) store_pair(out, dtype, 2 * pair, of(o.x), of(o.y));
    }
    METHOD void write(int dim, float o) const { write_final(dim, of(o)); }
    METHOD void write_final(int dim, float x) const {
        if (out) store_one(out, dtype, dim, x);
    }
};

}  // namespace attn
