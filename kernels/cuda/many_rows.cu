// many_rows.cu: attention of 9 and more query rows to each KV head, up to whole prompts, with products of a warpgroup (sm_90a).
//
// Grid      persistent, a CTA to each SM; a warpgroup of producers and two that attend 64 rows each: one team for 128 rows, or two of 64.
// Split     work items, (query block, KV head), in order; where there are many, each team attends whole ones, else runs of spans.
// Pipeline  each team has a ring of stages, which its producer warp fills (kv_pipeline.cuh). Products read keys and values from there; codes of 4 bits
//           are turned into bytes first, by the warps of the producers, in a ring of their own.
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
constexpr int TEAM_BARRIER = 1, WARPGROUP_BARRIER = 1 + WARPGROUPS;  // named barriers, the first of two each
constexpr int PRODUCER_REGISTERS = UNPACKS ? 56 : 40, ATTENDER_REGISTERS = UNPACKS ? 224 : 232;  // of an SM's 512 for three warps of a scheduler

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

// Copies the team's tiles in the order of its walk, a stage at a time.
struct Issuer {
    const DecodeParams& p;
    Walk walk;
    TileCopier<PartSource> copier;
    int end;

    __device__ __forceinline__ void start(const Ring& ring, int lane) {
        copier.ring = ring;
        copier.lane = lane;
        copier.step = 1;
        copier.stage_of_tile = 0;
        copier.maps = nullptr;
        copier.tile = end = 0;
    }
    // False if nothing is left.
    __device__ __forceinline__ bool issue() {
        Part& part = copier.source.part;
        if (copier.tile >= end) {
            do {
                if (!walk.next(p, part)) return false;
                copier.tile = part.first_tile();
                end = part.end_tile();
            } while (copier.tile >= end);
            copier.begin(p, part.sequence, part.kv_head, part.first_residual_tile);
            copier.appended = first_appended_tile(p, part.kv_len);
            copier.prefetch_residuals(p, end);
            copier.load_page_indices(p);
        }
        if (copier.copy_next(p) && copier.known == 32) copier.load_page_indices(p);
        return true;
    }
};

// ---- codes of 4 bits ----

// A reader is done with some stages.
DEVICE void release_stages(Ring& ring, int count, int lane) {
#pragma unroll 1
    for (; count > 0; count--) {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(ring.empty());
        ring.advance();
    }
}

// The ring of bytes: a stage has K's or V's codes and parameters of a tile, or the side's residuals, which come behind it.
struct ByteRing {
    u32 stages, barriers;  // shared addresses; barriers: full[BYTE_STAGES], then empty[BYTE_STAGES]
    int stage;
    u32 phase;

    DEVICE void init(u32 barriers, int stage) {
        barrier_init(barriers + stage * 8, UNPACKERS * ARRIVALS);
        barrier_init(barriers + (BYTE_STAGES + stage) * 8, 4 * ROW_WARPS * ARRIVALS);
        barrier_init_fence();
    }
    __device__ __forceinline__ u32 at() const { return stages + stage * BYTE_STAGE; }
    __device__ __forceinline__ void advance() {
        if (++stage >= BYTE_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ u32 wait_full() const {
        barrier_wait(barriers + stage * 8, phase);
        return at();
    }
    __device__ __forceinline__ u32 wait_empty() const {
        barrier_wait(barriers + (BYTE_STAGES + stage) * 8, phase ^ 1);
        return at();
    }
    // What this warp has written is seen by products.
    __device__ __forceinline__ void publish(int lane) {
        fence_async();
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(barriers + stage * 8);
        advance();
    }
    __device__ __forceinline__ void release(int lane) {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(barriers + (BYTE_STAGES + stage) * 8);
        advance();
    }
};

// Nibbles of a side's tile to bytes: eight rows of 16 low nibbles, then those of the high ones. Half steps are 16 times as large. `thread`: of
// the team's unpackers.
template <bool IS_SIXTEENFOLD> DEVICE void unpack(u32 from, u32 to, int thread) {
#pragma unroll 2
    for (int i = thread; i < TILE * HEAD_DIM / 32; i += 32 * UNPACKERS) {
        float4 x = lds128(from + i * 16);
        u32 words[4] = {float_bits(x.x), float_bits(x.y), float_bits(x.z), float_bits(x.w)};
        float low[4], high[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            low[n] = bits_float(IS_SIXTEENFOLD ? words[n] << 4 & 0xf0f0f0f0 : words[n] & 0x0f0f0f0f);
            high[n] = bits_float(IS_SIXTEENFOLD ? words[n] & 0xf0f0f0f0 : words[n] >> 4 & 0x0f0f0f0f);
        }
        u32 row = to + (i / 8 * 16 + i % 8) * 16;
        sts128(row, {low[0], low[1], low[2], low[3]});
        sts128(row + 128, {high[0], high[1], high[2], high[3]});
    }
}
// A side's parameters as floats: of half steps the scale of a sixteenth, of plain codes the scale and the shift.
template <int SCHEME> DEVICE void unpack_params(u32 from, u32 to, int thread) {
    SideParams<SCHEME, RowScales> params = {from, 0, {}};
    for (int t = thread; t < TILE; t += 32 * UNPACKERS) {
        if constexpr (SCHEME == INT4) {
            float2 x = params.scale_shift(0, t);
            sts64(to + t * 8, x.x, x.y);
        } else {
            sts32(to + t * 4, float_bits(params.scale(0, t) * RESIDUAL_STEP));
        }
    }
}
// Unpacks the team's tiles, and goes on copying those ahead; the unpacker-th of the team's warps.
DEVICE void unpack_tiles(const DecodeParams& p, Walk walk, Issuer& issuer, Ring ring, ByteRing bytes, int unpacker, int lane) {
    int thread = unpacker * 32 + lane;
    auto issue = [&](int stages) {
        if (unpacker == 0)
#pragma unroll 1
            for (; stages > 0; stages--) issuer.issue();
    };
    issue(STAGES);
    Part part;
#pragma unroll 1
    while (walk.next(p, part)) {
#pragma unroll 1
        for (int index = part.first_tile(); index < part.end_tile(); index++) {
            bool residuals = WINDOW && index >= part.first_residual_tile;
            Ring next = ring;
            Stages at;
            wait_keys(next, residuals, at);
            wait_values(next, residuals, at);
            auto publish = [&](auto write) {
                write(bytes.wait_empty());
                bytes.publish(lane);
            };
            publish([&](u32 to) {
                unpack<K_HALF_STEPS>(at.k.at, to, thread);
                unpack_params<K_SCHEME>(at.k.at + K_CODES, to + BYTE_PARAMS, thread);
            });
            if (K_WINDOW && residuals) publish([&](u32 to) { unpack<false>(at.k_residuals.at, to, thread); });
            publish([&](u32 to) {
                unpack<V_HALF_STEPS>(at.v.at, to, thread);
                unpack_params<V_SCHEME>(at.v.at + V_CODES, to + BYTE_PARAMS, thread);
            });
            if (V_WINDOW && residuals) publish([&](u32 to) { unpack<false>(at.v_residuals.at, to, thread); });
            int stages = stages_of_keys(residuals) + stages_of_values(residuals);
            release_stages(ring, stages, lane);
            issue(stages);
        }
    }
}

// One of the producers' warps.
DEVICE void produce(const DecodeParams& p, const Walk& walk, const Ring& ring, const ByteRing& bytes, int unpacker, int lane) {
    Issuer issuer = {p, walk};
    issuer.start(ring, lane);
    if constexpr (UNPACKS) {
        unpack_tiles(p, walk, issuer, ring, bytes, unpacker, lane);
    } else {
#pragma unroll 1
        while (unpacker == 0 && issuer.issue()) {
        }
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

DEVICE int quad_sum(int x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Parameters of two neighbouring tokens: as floats, or as they lie in a page.
template <int SCHEME> struct PairParams {
    static constexpr bool IS_4 = code_bits(SCHEME) == 4, HAS_SHIFTS = SCHEME == INT4, HAS_SCALES = has_row_scales(SCHEME);
    u32 at;

    __device__ __forceinline__ void read(int t, float (&scale)[2], float (&shift)[2]) const {
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

struct Attender {
    const DecodeParams& p;
    Ring ring;
    ByteRing bytes;
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
                if (K_SHIFTS || K_HALF_STEPS) sum = signed_byte_sum(word, sum);
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

    // Which of the thread's rows read a tile with residuals, by the window of a side.
    __device__ __forceinline__ bool is_fine(int h, int index, int window) const { return rows.tile[h] < index + window; }

    // Scores from sums of integers. Without score modifiers they still are to be multiplied by the row's scale.
    __device__ __forceinline__ void find_scores(const int (&sums)[SUMS_OF_TILE], int index, u32 params, float (&s)[SUMS_OF_TILE]) const {
        PairParams<K_SCHEME> k = {params};
        int bias[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (K_SHIFTS) bias[h] = -8 * rows.sum[h];
            if (K_HALF_STEPS) bias[h] = rows.sum[h] * (K_WINDOW && is_fine(h, index, K_WINDOW) ? -255 : -240);
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            float scale[2] = {1.0f, 1.0f}, shift[2];
            k.read(8 * j + 2 * (lane % 4), scale, shift);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int h = n / 2, e = n % 2, sum = sums[4 * j + n];
                if (K_SHIFTS) sum = sum + bias[h];
                if (K_HALF_STEPS) sum = sum * 2 + bias[h];
                float x = (float)sum;
                if (K_SCHEME != INT8_TENSOR) x = x * scale[e];
                if (K_SHIFTS) x = x + (float)rows.sum[h] * shift[e];
                s[4 * j + n] = HAS_SCORE_MODS ? x * rows.scale[h] : x;
            }
        }
        if (!HAS_SCORE_MODS) return;
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) {
            int h = i / 2 % 2, t = index * TILE + token_of(i / 4, i % 2, lane);
            if (p.softcap_inner != 0.0f) s[i] = softcap(s[i], p.softcap_inner, p.softcap_outer);
            if (p.alibi_slopes) s[i] = s[i] + rows.slope[h] * (float)(t - rows.position[h]);
        }
    }
    // Calls hide(i) for the scores of tokens that a row does not see.
    template <class Hide> __device__ __forceinline__ void each_hidden(int index, Hide hide) const {
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++)
            if (!rows.sees(i / 2 % 2, index * TILE + token_of(i / 4, i % 2, lane))) hide(i);
    }

    // What a tile's weights leave for its values.
    struct Weighed {
        u32 a[2][4];  // bytes in slot order, which are the left operand of products with V
        float alpha[2], beta[2], step[2];
        int sum[2];      // W, where V's codes need it
        float shift[2];  // z
    };
    // Replaces scores by weights, and updates the maxima and sums.
    __device__ __forceinline__ void weigh_tile(float (&s)[SUMS_OF_TILE], int index, u32 params, Weighed& w) {
        bool full = rows.see_all(index * TILE);
        if (!full) each_hidden(index, [&](int i) { s[i] = MINUS_INFINITY; });
        float top[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
            for (int j = 1; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[e] = fmaxf(x[e], s[4 * j + 2 * h + e]);
            float largest = quad_max(fmaxf(x[0], x[1]));
            bool some = largest > MINUS_INFINITY;
            // The largest product is that of the largest number: rounding keeps the order.
            top[h] = some ? ceilf(HAS_SCORE_MODS ? largest : largest * rows.scale[h]) : MINUS_INFINITY;
            float tile_m = top[h] - 1.0f, now = fmaxf(m[h], tile_m);
            w.alpha[h] = pow2(now - m[h]);
            w.beta[h] = some ? pow2(now - tile_m) : -0.0f;
            m[h] = now;
        }
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) {
            int h = i / 2 % 2;
            float score = HAS_SCORE_MODS ? s[i] : s[i] * rows.scale[h];
            s[i] = exp2w(fma_saturate(score, -0.015625f, 0.015625f * top[h]));
        }
        if (!full) each_hidden(index, [&](int i) { s[i] = 0.0f; });
        u32 units[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) units[i / 2 % 2] += float_bits(s[i] + WEIGHT_BASE);
        float largest[2] = {0.0f, 0.0f};
        scale_weights(s, full, params, largest, w.shift);
        WeightStep step[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            step[h] = weight_step(quad_max(largest[h]), V_WINDOW && is_fine(h, index, V_WINDOW));
            w.step[h] = step[h].step;
            u32 sum = quad_sum((int)(units[h] - 16 * WEIGHT_BASE_BITS));
            l[h] = fmaf((float)(int)sum, exp2i(-22) * w.beta[h], l[h] * w.alpha[h]);
            w.sum[h] = 0;
        }
        // Tokens 2c, 2c + 1, 2c + 8, 2c + 9 of a panel of 16.
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
            u32 b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                int j = 2 * panel + i / 2;
                uint2 x = lds64(thresholds + token_of(j, 0, lane) * 4);
                float threshold[2] = {bits_float(x.x), bits_float(x.y)};
#pragma unroll
                for (int n = 0; n < 4; n++) b[n / 2][i + n % 2] = float_bits(s[4 * j + n] * step[n / 2].inverse + threshold[n % 2]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 word = __byte_perm(__byte_perm(b[h][0], b[h][1], 0x0051), __byte_perm(b[h][2], b[h][3], 0x0051), 0x5410);
                w.a[panel / 2][panel % 2 * 2 + h] = word;
                if (V_INT4) w.sum[h] = byte_sum(word, w.sum[h]);
            }
        }
        if (V_INT4)
#pragma unroll
            for (int h = 0; h < 2; h++) w.sum[h] = quad_sum(w.sum[h]);
    }
    // Products of weights with V's scales, the largest of each row, and the sums with V's shifts.
    __device__ __forceinline__ void scale_weights(float (&s)[SUMS_OF_TILE], bool exist, u32 params, float (&largest)[2], float (&shifts)[2]) const {
        PairParams<V_SCHEME> v = {params};
        float z[2][2] = {};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            float scale[2] = {1.0f, 1.0f}, shift[2];
            v.read(8 * j + 2 * (lane % 4), scale, shift);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (has_row_scales(V_SCHEME) && !exist) scale[e] = finite_scale(scale[e]);
                if (V_SHIFTS && !exist) shift[e] = finite(shift[e]);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& x = s[4 * j + 2 * h + e];
                    if (V_SHIFTS) z[h][e] = z[h][e] + x * shift[e];
                    if (has_row_scales(V_SCHEME)) x = x * scale[e];
                    largest[h] = fmaxf(largest[h], x);
                }
            }
        }
        if (V_SHIFTS)
#pragma unroll
            for (int h = 0; h < 2; h++) shifts[h] = quad_sum(z[h][0] + z[h][1]);
    }

    // ---- a tile ----

    // Where a side's codes of a tile lie in bytes, its parameters, and its residuals, or 0.
    struct Place {
        u32 codes, params, residuals;
    };
    __device__ __forceinline__ Place wait_keys_or_values(bool is_k, bool residuals) {
        if constexpr (UNPACKS) {
            u32 at = bytes.wait_full();
            ByteRing next = bytes;
            next.advance();
            return {at, at + BYTE_PARAMS, residuals ? next.wait_full() : 0};
        } else if (is_k) {
            u32 at = ring.wait();
            return {at, at + K_CODES, 0};
        } else {
            u32 at = ring.wait();
            if (KV_ONE_STAGE) at += K_BYTES_OF_BLOCK;
            return {at, at + V_CODES, 0};
        }
    }
    __device__ __forceinline__ void release_keys_or_values(bool is_k, bool residuals) {
        if constexpr (UNPACKS) {
            bytes.release(lane);
            if (residuals) bytes.release(lane);
        } else if (!KV_ONE_STAGE || !is_k) {
            release_stages(ring, 1, lane);
        }
    }
    __device__ __forceinline__ void multiply_keys(const Place& at, int index, int (&sums)[SUMS_OF_TILE]) const {
        products_begin();
#pragma unroll
        for (int i = 0; i < PANELS / 2; i++)
            Products<!K_INT4>::multiply_shared(sums, matrices(queries + i * 2 * 64 * 16, 64 * 16), matrices(at.codes + i * 2 * TILE * 16, TILE * 16), i > 0);
        if (K_WINDOW && at.residuals)
#pragma unroll
            for (int i = 0; i < PANELS / 2; i++) {
                // The queries of rows that read K with residuals.
                u32 a[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 word = lds32(queries + ((2 * i + n / 2) * 64 + 16 * warp + 8 * (n % 2) + lane / 4) * 16 + 4 * (lane % 4));
                    a[n] = is_fine(n % 2, index, K_WINDOW) ? word : 0;
                }
                Products<false>::multiply_signed(sums, a, matrices(at.residuals + i * 2 * TILE * 16, TILE * 16), true);
            }
        products_commit();
    }
    __device__ __forceinline__ void multiply_values(const Place& at, int index, const Weighed& w, int (&values)[ELEMENTS]) const {
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; i++) Products<!V_INT4>::multiply_unsigned(values, w.a[i], matrices(at.codes + i * 2 * HEAD_DIM * 16, HEAD_DIM * 16), i > 0);
        if (V_WINDOW && at.residuals)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 a[4];
#pragma unroll
                for (int n = 0; n < 4; n++) a[n] = is_fine(n % 2, index, V_WINDOW) ? w.a[i][n] : 0;
                Products<false>::multiply_unsigned(values, a, matrices(at.residuals + i * 2 * HEAD_DIM * 16, HEAD_DIM * 16), true);
            }
        products_commit();
    }
    __device__ __forceinline__ void fold(const int (&values)[ELEMENTS], int index, const Weighed& w) {
        float unit[2];
        int bias[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unit[h] = V_SHIFTS ? w.step[h] : w.step[h] * w.beta[h];
            if (V_SHIFTS) bias[h] = -8 * w.sum[h];
            if (V_HALF_STEPS) bias[h] = w.sum[h] * (V_WINDOW && is_fine(h, index, V_WINDOW) ? -255 : -240);
        }
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            int h = i / 2 % 2, sum = values[i];
            if (V_SHIFTS) sum = sum + bias[h];
            if (V_HALF_STEPS) sum = sum * 2 + bias[h];
            if (V_SHIFTS) o[i] = fmaf(fmaf((float)sum, unit[h], w.shift[h]), w.beta[h], o[i]);
            else o[i] = fmaf((float)sum, unit[h], o[i]);
        }
    }

    // Folds a tile into the segment's state.
    __device__ __forceinline__ void tile(const Part& part, int index) {
        bool residuals = WINDOW && index >= part.first_residual_tile;
        Place at = wait_keys_or_values(true, K_WINDOW && residuals);
        int sums[SUMS_OF_TILE];
        multiply_keys(at, index, sums);
        products_wait<0>();
        float s[SUMS_OF_TILE];
        find_scores(sums, index, at.params, s);
        release_keys_or_values(true, K_WINDOW && residuals);
        at = wait_keys_or_values(false, V_WINDOW && residuals);
        Weighed w = {};
        w.alpha[0] = w.alpha[1] = 1.0f;
        if (has_rows) weigh_tile(s, index, at.params, w);
        int values[ELEMENTS];
        multiply_values(at, index, w, values);
        if (__any_sync(~0u, w.alpha[0] != 1.0f || w.alpha[1] != 1.0f))
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) o[i] = o[i] * w.alpha[i / 2 % 2];
        products_wait<0>();
        release_keys_or_values(false, V_WINDOW && residuals);
        if (has_rows) fold(values, index, w);
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
    auto byte_barriers_of = [&](int team) { return base + SharedMemory::BARRIERS + TEAMS * STAGES * 16 + team * BYTE_STAGES * 16; };
    if (UNPACKS && threadIdx.x < TEAMS * BYTE_STAGES) ByteRing::init(byte_barriers_of(threadIdx.x / larger(BYTE_STAGES, 1)), threadIdx.x % larger(BYTE_STAGES, 1));
    if (threadIdx.x < TILE) sts32(base + SharedMemory::THRESHOLDS + threadIdx.x * 4, float_bits(threshold(threadIdx.x)));
    if (threadIdx.x == THREADS - 1) touch_params(p, base + SharedMemory::NOWHERE);
    after_dependencies(p);
    Walk* walks = (Walk*)(shared + SharedMemory::WALKS);
    find_work(p, walks, (u32*)(shared + SharedMemory::SUMS));
    __syncthreads();
    auto ring_of = [&](int team) { return Ring{base + team * STAGES * STAGE_BYTES, barriers_of(team), 0, 0}; };
    auto bytes_of = [&](int team) { return ByteRing{base + SharedMemory::BYTES_AT + team * BYTE_STAGES * BYTE_STAGE, byte_barriers_of(team), 0, 0}; };
    if (warp < 4) {
        give_up_registers<PRODUCER_REGISTERS>();
        int team = warp % TEAMS;
        produce(p, walks[team], ring_of(team), bytes_of(team), warp / TEAMS, lane);
        return;
    }
    take_registers<ATTENDER_REGISTERS>();
    int warpgroup = warp / 4 - 1, team = warpgroup / ROW_WARPS, thread = threadIdx.x % 128;
    float4* states = (float4*)(p.partial_o + p.row_states_at);
    Attender self = {p, ring_of(team), bytes_of(team), base + SharedMemory::QUERIES + warpgroup * 64 * HEAD_DIM, base + SharedMemory::THRESHOLDS,
                     base + SharedMemory::STATES + warpgroup * 64 * HEAD_DIM * 4 + thread * 16, states + (blockIdx.x * WARPGROUPS + warpgroup) * (HEAD_DIM / 8) * 128 + thread,
                     warpgroup, warp % 4, lane};
    // Teams whose rows are few have them in warps of different places: a place is a scheduler's.
    self.first_row = warpgroup % ROW_WARPS * 64 + (self.warp + 4 - team) % 4 * 16;
    Meeting meeting = {p, (Arrival*)(shared + SharedMemory::ARRIVALS_AT + 16 * team), TEAM_BARRIER + team};
    Walk walk = walks[team];
    Claims claims = {};
    Part part;
#pragma unroll 1
    while (walk.next(p, part))
        if (self.attend(part)) meeting.count(part, claims);
    meeting.finish(claims);
}
