// many_rows.cu: attention of 9 and more query rows to each KV head, up to whole prompts, with products of a warpgroup (sm_90a).
//
// Grid      persistent, a CTA to each SM; a warpgroup of producers and two that attend 64 rows each: one team for 128 rows, or two of 64.
// Split     work items, (query block, KV head), in order; where there are many, each team attends whole ones, else runs of spans.
// Pipeline  each team has a ring of stages, which its producer warp fills (kv_pipeline.cuh). Keys and values are read from there by the products.
// Merge     a segment's state is in registers, a span's in shared memory, the row's in the workspace: each thread has its own elements. Parts of a
//           work item by several teams meet in the workspace (partials_counted.cuh).
// Reads     q; pages; page table, lengths.
// Writes    out, lse; states, partials and arrival counts in the workspace.
// Numerics  docs/arithmetic.md. The order of every rounding is the same on every grid.
// Shared    many_rows_smem.cuh.
// Host      kernels/src/cuda: select.rs (configuration), launch.rs, smem.rs; attn-cuda/src/native/launch_plan.rs.
#include "wgmma.cuh"
#include "kv_pipeline.cuh"
#include "many_rows_smem.cuh"
#include "partials_counted.cuh"

static_assert(INTEGER && PAGE >= TILE && K_GROUPS == 1 && V_GROUPS == 1 && HEAD_DIM % 32 == 0 && HEAD_DIM <= 128, "select.rs");

constexpr int SUMS_OF_TILE = TILE / 2, ELEMENTS = HEAD_DIM / 2;  // of a thread: scores, and dims of O
constexpr int TEAM_BARRIER = 1, WARPGROUP_BARRIER = 3;           // named barriers, the first of two each

// ---- the split ----

// A team's part of a work item: spans from `first` to `end`.
struct Part {
    int b, kv_head, row_block, sequence, kv_len, num_tiles, num_spans, first_residual_tile, first, end;

    __device__ __forceinline__ bool is_all() const { return first == 0 && end == num_spans; }
    __device__ __forceinline__ int first_tile() const { return first << SPAN_SHIFT; }
    __device__ __forceinline__ int end_tile() const { return min(num_tiles, end << SPAN_SHIFT); }
    __device__ __forceinline__ WorkItem item() const { return {b, kv_head, row_block, num_spans}; }
};

// A team's way through its work items. Their costs are spans, or where each team has whole items, tiles and a bit.
struct Walk {
    u32 start, end, item, cost;  // the team's part of all costs, the cost of all items before this one, and its own
    int b, kv_head, kv_len;

    DEVICE bool has_whole_items(const DecodeParams& p) { return p.max_partials == 0; }
    DEVICE u32 cost_of(const DecodeParams& p, int kv_len) {
        int tiles = (kv_len + TILE - 1) / TILE;
        return has_whole_items(p) ? tiles + 4 : runs_of(tiles, SPAN_SHIFT);
    }
    __device__ __forceinline__ void enter(const DecodeParams& p, int block) {
        b = block;
        kv_head = 0;
        kv_len = kv_len_of(p, b);
        cost = cost_of(p, kv_len);
    }
    // The team's next part, if there is one.
    __device__ __forceinline__ bool next(const DecodeParams& p, Part& part) {
#pragma unroll 1
        while (b < p.batch && item < end) {
            bool whole = has_whole_items(p), takes = whole ? item >= start : item + cost > start;
            QueryBlock queries = query_block(p, b);
            part.b = b;
            part.kv_head = kv_head;
            part.row_block = 0;
            part.sequence = queries.sequence;
            part.kv_len = kv_len;
            part.num_tiles = (kv_len + TILE - 1) / TILE;
            part.num_spans = runs_of(part.num_tiles, SPAN_SHIFT);
            part.first_residual_tile = first_residual_tile_of(p, queries.tokens, kv_len);
            part.first = whole || item >= start ? 0 : start - item;
            part.end = whole ? part.num_spans : min(part.num_spans, (int)(end - item));
            item += cost;
            if (++kv_head == p.num_kv_heads && ++b < p.batch) enter(p, b);
            else if (kv_head == p.num_kv_heads) kv_head = 0;
            if (takes) return true;
        }
        return false;
    }
};
static_assert(sizeof(Walk) <= WALK_BYTES, "many_rows_smem.cuh");

// The ways of the CTA's teams, which are visible behind the next barrier. All threads of the CTA.
DEVICE void find_work(const DecodeParams& p, Walk* walks, u32* sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunk = (p.batch + THREADS - 1) / THREADS;
    int begin = min(p.batch, (int)threadIdx.x * chunk), stop = min(p.batch, begin + chunk);
    u32 mine = 0;
    for (int b = begin; b < stop; b++) mine += Walk::cost_of(p, kv_len_of(p, b));
    mine *= p.num_kv_heads;
    u32 up_to = mine;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        u32 other = __shfl_up_sync(~0u, up_to, i);
        if (lane >= i) up_to += other;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    u32 total = 0, from = up_to - mine;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        u32 of_warp = sums[w];
        if (w < warp) from += of_warp;
        total += of_warp;
    }
    u32 teams = gridDim.x * TEAMS, each = total / teams, rest = total - each * teams;
#pragma unroll
    for (int team = 0; team < TEAMS; team++) {
        u32 i = blockIdx.x * TEAMS + team, start = each * i + min(i, rest), end = start + each + (i < rest);
        if (start == end && threadIdx.x == 0) walks[team].b = p.batch;
        if (start == end || start < from || start >= from + mine) continue;
        Walk walk = {start, end, from};
        walk.enter(p, begin);
        while (start >= walk.item + walk.cost * p.num_kv_heads) {
            walk.item += walk.cost * p.num_kv_heads;
            walk.enter(p, walk.b + 1);
        }
        walk.kv_head = (start - walk.item) / walk.cost;
        walk.item += walk.kv_head * walk.cost;
        walks[team] = walk;
    }
}

// ---- the producer ----

struct PartSource {
    Part part;

    __device__ __forceinline__ int sequence() const { return part.sequence; }
    __device__ __forceinline__ int kv_len() const { return part.kv_len; }
    __device__ __forceinline__ int kv_head() const { return part.kv_head; }
    __device__ __forceinline__ int first_residual_tile(const DecodeParams&) const { return part.first_residual_tile; }
};

DEVICE void produce(const DecodeParams& p, Walk walk, const Ring& ring, int lane) {
    TileCopier<PartSource> copier;
    copier.ring = ring;
    copier.lane = lane;
    copier.step = 1;
    copier.stage_of_tile = 0;
    copier.maps = nullptr;
    Part& part = copier.source.part;
#pragma unroll 1
    while (walk.next(p, part)) {
        copier.begin(p, part.sequence, part.kv_head, part.first_residual_tile);
        copier.appended = first_appended_tile(p, part.kv_len);
        copier.tile = part.first_tile();
        int end = part.end_tile();
        if (copier.tile >= end) continue;
        copier.prefetch_residuals(p, end);
        copier.load_page_indices(p);
#pragma unroll 1
        while (copier.tile < end)
            if (copier.copy_next(p) && copier.known == 32) copier.load_page_indices(p);
    }
    wait_for_dependencies();  // a launch that waits for this one relies on those before it, too
}

// ---- the rows ----

// A thread's two rows of a work item: warp row lane/4, and that + 8.
struct TwoRows {
    int start[2], end[2];  // tokens that a row sees
    int position[2], tile[2];
    float slope[2];
    float scale[2];  // σ
    int sum[2];      // Q

    __device__ __forceinline__ bool sees(int h, int t) const { return t >= start[h] && t < end[h]; }
    __device__ __forceinline__ bool see_all(int t0) const {
        bool full = true;
#pragma unroll
        for (int h = 0; h < 2; h++) full &= start[h] <= t0 && t0 + TILE <= end[h];
        return __all_sync(~0u, full);
    }
};

DEVICE float quad_sum_in_order(float x) {
    x = x + __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
DEVICE int quad_sum(int x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
// The sum of a word's four bytes, unsigned or signed, and `c`.
DEVICE int byte_sum(u32 x, int c) { return c + (int)(x & 255) + (int)(x >> 8 & 255) + (int)(x >> 16 & 255) + (int)(x >> 24); }

struct Attender {
    const DecodeParams& p;
    Ring ring;
    u32 queries, thresholds;  // shared addresses
    u32 span;                 // of the thread's elements of a span's state, 2048 bytes apart
    float4* row_state;        // in the workspace, 128 apart
    int warpgroup, warp, lane;  // `warp`: of the warpgroup
    int first_row;              // of the warp in its work item
    bool has_rows;              // whether some of the warp's rows are no padding
    TwoRows rows;
    float m[2], l[2], o[ELEMENTS];

    DEVICE int token_of(int j, int e, int lane) { return 8 * j + 2 * (lane % 4) + e; }

    __device__ __forceinline__ void load_rows(const Part& part) {
        QueryBlock queries_of = query_block(p, part.b);
        int count = p.heads_per_kv * queries_of.tokens, first = first_position(p, queries_of, part.kv_len);
        has_rows = first_row < count;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = first_row + lane / 4 + 8 * h, i = (u32)row / p.heads_per_kv_divmod, position = first + i;
            bool real = row < count;
            // Rows that fill up the tile see everything, so that they never make a full tile look masked.
            rows.end[h] = !real ? 0x7fffffff : p.causal ? min(max(position + 1, 0), part.kv_len) : part.kv_len;
            rows.start[h] = !HAS_SCORE_MODS || !real || p.window_left < 0 ? 0 : min(max(position - p.window_left, 0), rows.end[h]);
            rows.slope[h] = HAS_SCORE_MODS && real && p.alibi_slopes ? p.alibi_slopes[(part.kv_head - i) * p.heads_per_kv + row] : 0.0f;
            rows.position[h] = position;
            rows.tile[h] = !real ? 0x7fffffff : max(p.causal ? position : part.kv_len - 1, 0) / TILE;
        }
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);  // products with the last queries are done
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = first_row + lane / 4 + 8 * h;
            float x[PANELS][4], largest = load_row(query_row(p, part, part.kv_head, row), lane, x);
            bool counts = largest >= 0x1p-60f;
            float inverse = counts ? 127.0f * rcp(largest) : 0.0f;
            rows.scale[h] = counts ? largest * bits_float(0x3C010204) : 0.0f;
            int sum = 0;
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                u32 r[4];
#pragma unroll
                for (int i = 0; i < 4; i++) r[i] = float_bits(x[panel][i] * inverse + MAGIC);
                u32 word = __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
                if (K_SHIFTS || K_HALF_STEPS) sum = byte_sum(word ^ 0x80808080u, sum) - 512;
                sts32(queries + (panel * 64 + 16 * warp + 8 * h + lane / 4) * 16 + 4 * (lane % 4), word);
            }
            rows.sum[h] = K_SHIFTS || K_HALF_STEPS ? quad_sum(sum) : 0;
        }
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    __device__ __forceinline__ void clear() {
        m[0] = m[1] = MINUS_INFINITY;
        l[0] = l[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) o[i] = 0.0f;
    }

    // Scores, from sums of integers; weights in bytes `a` in slot order, which are the left operand of the products with V; what sums with V are
    // multiplied by, and the factors of O.
    template <class KeyParams, class ValueParams>
    __device__ __forceinline__ void weigh_tile(int (&sums)[SUMS_OF_TILE], int t0, const KeyParams& k, const ValueParams& v, u32 (&a)[2][4], float (&unit)[2], float (&alpha)[2]) {
        bool full = rows.see_all(t0), exist = full;
        float s[SUMS_OF_TILE];
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float scale = K_SCHEME == INT8_TENSOR ? 1.0f : k.scale(0, token_of(j, e, lane));
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int i = 4 * j + 2 * h + e;
                    s[i] = K_SCHEME == INT8_TENSOR ? (float)sums[i] : (float)sums[i] * scale;
                    if (HAS_SCORE_MODS) s[i] = s[i] * rows.scale[h];
                }
            }
        if (HAS_SCORE_MODS) {
#pragma unroll
            for (int i = 0; i < SUMS_OF_TILE; i++) {
                int h = i / 2 % 2, t = t0 + token_of(i / 4, i % 2, lane);
                if (p.softcap_inner != 0.0f) s[i] = softcap(s[i], p.softcap_inner, p.softcap_outer);
                if (p.alibi_slopes) s[i] = s[i] + rows.slope[h] * (float)(t - rows.position[h]);
            }
        }
        if (!full)
#pragma unroll
            for (int i = 0; i < SUMS_OF_TILE; i++)
                if (!rows.sees(i / 2 % 2, t0 + token_of(i / 4, i % 2, lane))) s[i] = MINUS_INFINITY;
        float top[2], beta[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
            for (int j = 1; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[e] = fmaxf(x[e], s[4 * j + 2 * h + e]);
            float largest = quad_max(fmaxf(x[0], x[1]));
            bool some = largest > MINUS_INFINITY;
            // The largest product is that of the largest number: products with a scale keep the order.
            top[h] = some ? ceilf(HAS_SCORE_MODS ? largest : largest * rows.scale[h]) : MINUS_INFINITY;
            float tile_m = top[h] - 1.0f, now = fmaxf(m[h], tile_m);
            alpha[h] = pow2(now - m[h]);
            beta[h] = some ? pow2(now - tile_m) : -0.0f;
            m[h] = now;
        }
        // Weights, and their sum.
        u32 units[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) {
            int h = i / 2 % 2;
            float score = HAS_SCORE_MODS ? s[i] : s[i] * rows.scale[h];
            s[i] = exp2w(fma_saturate(score, -0.015625f, 0.015625f * top[h]));
        }
        if (!full)
#pragma unroll
            for (int i = 0; i < SUMS_OF_TILE; i++)
                if (!rows.sees(i / 2 % 2, t0 + token_of(i / 4, i % 2, lane))) s[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) units[i / 2 % 2] += float_bits(s[i] + WEIGHT_BASE);
        // Products with V's scales, and the largest of each row.
        float largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float scale = 1.0f;
                if (has_row_scales(V_SCHEME)) {
                    scale = v.scale(0, token_of(j, e, lane));
                    if (!exist) scale = finite_scale(scale);
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& x = s[4 * j + 2 * h + e];
                    if (has_row_scales(V_SCHEME)) x = x * scale;
                    largest[h] = fmaxf(largest[h], x);
                }
            }
        WeightStep step[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            step[h] = weight_step(quad_max(largest[h]), false);
            unit[h] = step[h].step * beta[h];
            u32 sum = units[h] - 16 * WEIGHT_BASE_BITS;
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            l[h] = fmaf((float)(int)sum, exp2i(-22) * beta[h], l[h] * alpha[h]);
        }
        // Bytes of tokens 2c, 2c + 1, 2c + 8, 2c + 9 of a panel of 16.
#pragma unroll
        for (int panel = 0; panel < 4; panel++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 b[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int j = 2 * panel + i / 2, e = i % 2;
                    float threshold = bits_float(lds32(thresholds + token_of(j, e, lane) * 4));
                    b[i] = float_bits(s[4 * j + 2 * h + e] * step[h].inverse + threshold);
                }
                a[panel / 2][panel % 2 * 2 + h] = __byte_perm(__byte_perm(b[0], b[1], 0x0051), __byte_perm(b[2], b[3], 0x0051), 0x5410);
            }
    }

    __device__ __forceinline__ void release(int count) {
#pragma unroll 1
        for (; count > 0; count--) ring.release(lane);
    }

    // Folds a tile into the segment's state.
    __device__ __forceinline__ void tile(const Part& part, int index) {
        Ring next = ring;
        Stages at;
        wait_keys(next, false, at);
        int sums[SUMS_OF_TILE];
        products_begin();
#pragma unroll
        for (int i = 0; i < PANELS / 2; i++)
            Products<!K_INT4>::multiply_shared(sums, matrices(queries + i * 2 * 64 * 16, 64 * 16), matrices(at.k.at + i * 2 * TILE * 16, TILE * 16), i > 0);
        products_commit();
        products_wait<0>();
        wait_values(next, false, at);
        u32 a[2][4] = {};
        float unit[2], alpha[2] = {1.0f, 1.0f};
        SideParams<K_SCHEME, RowScales> k = {at.k.at + K_CODES, K_STRIDE, {}};
        SideParams<V_SCHEME, RowScales> v = {at.v.at + V_CODES, V_STRIDE, {}};
        if (has_rows) weigh_tile(sums, index * TILE, k, v, a, unit, alpha);
        int values[ELEMENTS];
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; i++) Products<!V_INT4>::multiply_unsigned(values, a[i], matrices(at.v.at + i * 2 * HEAD_DIM * 16, HEAD_DIM * 16), i > 0);
        products_commit();
        if (has_rows && __any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f))
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) o[i] = o[i] * alpha[i / 2 % 2];
        products_wait<0>();
        release(KV_ONE_STAGE ? 1 : 2);
        if (has_rows)
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) o[i] = fmaf((float)values[i], unit[i / 2 % 2], o[i]);
    }

    // ---- states ----

    // Merges the state in registers into the one before it, whose elements `load` gives: the result is in registers.
    template <class Load> __device__ __forceinline__ void merge_behind(float (&before_m)[2], float (&before_l)[2], Load load) {
        MergeScale w[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            w[h] = merge_scale(before_m[h], before_l[h], make_float2(m[h], l[h]), false);
            m[h] = before_m[h];
            l[h] = before_l[h];
        }
#pragma unroll
        for (int i = 0; i < ELEMENTS; i += 4) {
            float4 x = load(i / 4);
            float before[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int n = 0; n < 4; n++) {
                merge(before[n], o[i + n], w[n / 2], false);
                o[i + n] = before[n];
            }
        }
    }
    template <class Store> __device__ __forceinline__ void store_state(Store store) const {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i += 4) store(i / 4, {o[i], o[i + 1], o[i + 2], o[i + 3]});
    }

    // The state of a span, in registers.
    __device__ __forceinline__ void attend_span(const Part& part, int index, int end) {
        float span_m[2], span_l[2];
        bool has_span = false;
#pragma unroll 1
        while (true) {
            clear();
            int until = min(end, index + (1 << SEGMENT_SHIFT));
#pragma unroll 1
            for (; index < until; index++) tile(part, index);
            if (has_span) merge_behind(span_m, span_l, [&](int i) { return lds128(span + i * 2048); });
            if (index >= end) return;
            has_span = true;
            store_state([&](int i, const float4& x) { sts128(span + i * 2048, x); });
#pragma unroll
            for (int h = 0; h < 2; h++) {
                span_m[h] = m[h];
                span_l[h] = l[h];
            }
        }
    }

    __device__ __forceinline__ void write_partial(const Part& part, int partial) const {
        WorkItem item = part.item();
        u64 at = (item.index(p) * p.max_partials + partial) * ROWS;
        int count = item.rows(p);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = first_row + lane / 4 + 8 * h;
            if (row >= count) continue;
            if (lane % 4 == 0) __stcg(p.partial_max_sum + at + row, make_float2(m[h], l[h]));
            float* to = p.partial_o + (at + row) * HEAD_DIM + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++) __stcg((float2*)(to + 8 * j), make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]));
        }
    }
    __device__ __forceinline__ void write_rows(const Part& part) const {
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            Epilogue epilogue = Epilogue::at(p, part.item(), first_row + lane / 4 + 8 * h);
            epilogue.begin(h == 0 ? m[0] : m[1], h == 0 ? l[0] : l[1], lane % 4 == 0);
            float x[HEAD_DIM / 8][2];
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[j][e] = epilogue.of(h == 0 ? o[4 * j + e] : o[4 * j + 2 + e]);
            if constexpr (V_ROTATED) rotate_back<4>(x, lane % 4);
            if (epilogue.out)
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 8; j++) store_pair(epilogue.out, epilogue.dtype, 8 * j + 2 * (lane % 4), x[j][0], x[j][1]);
        }
    }

    // Attends the team's spans of a work item; true if others have the rest, and partials are written.
    __device__ __forceinline__ bool attend(const Part& part) {
        load_rows(part);
        float row_m[2], row_l[2];
        int first_span = part.first, last = part.end - 1;
#pragma unroll 1
        for (int span_index = first_span; span_index <= last; span_index++) {
            int index = span_index << SPAN_SHIFT;
            attend_span(part, index, min(part.num_tiles, index + (1 << SPAN_SHIFT)));
            if (first_span > 0) {
                write_partial(part, span_index);
                continue;
            }
            if (span_index > 0) merge_behind(row_m, row_l, [&](int i) { return __ldcg(row_state + i * 128); });
            if (span_index == last) break;
            store_state([&](int i, const float4& x) { __stcg(row_state + i * 128, x); });
#pragma unroll
            for (int h = 0; h < 2; h++) {
                row_m[h] = m[h];
                row_l[h] = l[h];
            }
        }
        if (part.is_all()) {
            write_rows(part);
            return false;
        }
        if (first_span == 0) write_partial(part, last);
        return true;
    }
};

// ---- parts of a work item meet ----

// The team's parts that are counted, and whose slices it has still to merge: at most the first and the last.
struct Claims {
    WorkItem item[2];
    u32 slices[2];
    int count;
};

struct Meeting {
    const DecodeParams& p;
    Arrival* arrival;  // in shared memory
    int barrier;

    __device__ __forceinline__ void team_barrier() const { barrier_of<MERGE_THREADS>(barrier); }
    __device__ __forceinline__ bool is_first_thread() const { return merge_thread() == 0; }

    // Merges these slices of an item whose partials have all arrived, a row by each warp.
    __device__ __forceinline__ void merge_rows(const WorkItem& item, int first, u32 slices) const {
        int rows = item.rows(p);
#pragma unroll 1
        for (int row = merge_thread() / 32; row < rows; row += MERGE_THREADS / 32)
            if (slices >> row / SLICE_ROWS & 1) merge_row<float4, 32>(p, item, first, row, 0, 0, ROW_VECTORS);
    }
    // What a thread found for all.
    __device__ __forceinline__ Arrival of_team(const Arrival& found) const {
        if (is_first_thread()) *arrival = found;
        team_barrier();
        Arrival all = *arrival;
        team_barrier();
        return all;
    }
    // Counts partials from `from` to `end`, and claims slices to merge.
    __device__ __forceinline__ void count(const Part& part, Claims& claims) const {
        WorkItem item = part.item();
        team_barrier();  // the partials are written
        u32 mine = slices_for(p, item, part.first, part.end);
        Arrival found = {0, 0};
        if (is_first_thread()) {
            u32* at = p.counters + item.index(p);
            u32 add = ArrivalCount::of(part.end - part.first, part.first == 0 ? part.end - 1 : 0, mine), before = count_release(at, add);
            if (ArrivalCount{before + add}.partials() == (u32)item.num_partials) found = on_arrival(p, item, before, add);
        }
        found = of_team(found);
        if (found.last) {
            merge_rows(item, found.last - 1, found.slices == ALL_SLICES ? slices_of(p, item) : found.slices);
        } else if (mine) {
            claims.item[claims.count] = item;
            claims.slices[claims.count++] = mine;
        }
    }
    // Waits for the items of the claims, and merges.
    __device__ __forceinline__ void finish(const Claims& claims) const {
#pragma unroll 1
        for (int i = 0; i < claims.count; i++) {
            const WorkItem& item = claims.item[i];
            Arrival found = {0, 0};
            if (is_first_thread()) found = {wait_for_partials(p.counters + item.index(p), claims.slices[i], item.num_partials), claims.slices[i]};
            found = of_team(found);
            if (found.last) merge_rows(item, found.last - 1, found.slices);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attn_decode(const __grid_constant__ DecodeParams p) {
    SHARED_MEMORY(shared, STAGE_ALIGN);
    int warp = threadIdx.x / 32, lane = lane_id();
    u32 base = shared_address(shared);
    auto barriers_of = [&](int team) { return base + SharedMemory::BARRIERS + team * STAGES * 16; };
    if (threadIdx.x < TEAMS * STAGES) Ring::init(barriers_of(threadIdx.x / STAGES), threadIdx.x % STAGES);
    if (threadIdx.x < TILE) sts32(base + SharedMemory::THRESHOLDS + threadIdx.x * 4, float_bits(threshold(threadIdx.x)));
    if (threadIdx.x == THREADS - 1) touch_params(p, base + SharedMemory::NOWHERE);
    after_dependencies(p);
    Walk* walks = (Walk*)(shared + SharedMemory::WALKS);
    find_work(p, walks, (u32*)(shared + SharedMemory::SUMS));
    __syncthreads();
    if (warp < 4) {
        give_up_registers<40>();
        if (warp < TEAMS) produce(p, walks[warp], {base + warp * STAGES * STAGE_BYTES, barriers_of(warp), 0, 0}, lane);
        return;
    }
    take_registers<232>();
    int warpgroup = warp / 4 - 1, team = warpgroup / ROW_WARPS, thread = threadIdx.x % 128;
    float4* states = (float4*)(p.partial_o + p.row_states_at);
    Attender self = {p, {base + team * STAGES * STAGE_BYTES, barriers_of(team), 0, 0}, base + SharedMemory::QUERIES + warpgroup * 64 * HEAD_DIM, base + SharedMemory::THRESHOLDS,
                     base + SharedMemory::STATES + warpgroup * 64 * HEAD_DIM * 4 + thread * 16, states + (blockIdx.x * WARPGROUPS + warpgroup) * (HEAD_DIM / 8) * 128 + thread,
                     warpgroup, warp % 4, lane};
    // The warps of two teams whose rows are few take turns in their places: a place is a scheduler's.
    self.first_row = warpgroup % ROW_WARPS * 64 + 16 * self.warp;
    Meeting meeting = {p, (Arrival*)(shared + SharedMemory::ARRIVALS_AT + 16 * team), TEAM_BARRIER + team};
    Walk walk = walks[team];
    Claims claims = {};
    Part part;
#pragma unroll 1
    while (walk.next(p, part))
        if (self.attend(part)) meeting.count(part, claims);
    meeting.finish(claims);
}
