// Split-KV decode attention over a quantized cache: docs/arithmetic.md on tensor cores.
//
// A persistent grid cuts the work into shares of equal cost (work.cuh). In a CTA four teams of warps take a span each, or the four
// segments of one, or their tiles, or a short item each, with a ring of stages of their own that the copy engine fills (feed.cuh);
// all query rows of a KV head share what is read. Nobody waits for a turn: a team folds and merges what it has, and the four states
// meet in shared memory once per unit (join.cuh): the joins took a quarter of int4's time when they came for every span. The order of
// every rounding is the law's, whatever the grid.
#include "feed.cuh"
#include "join.cuh"
#include "value.cuh"

struct Rows {
    int start[G], end[G];  // tokens that row lane/4 sees
    float slope[G];
    int position[G];
};

DEVICE Rows visible(const DecodeParams& p, const Work& work, int kv_head, int warp_row, int lane) {
    Rows rows;
#pragma unroll
    for (int g = 0; g < G; g++) {
        int r = work.row_block * ROWS + warp_row + g * 8 + lane / 4;
        bool real = r < p.heads_per_kv * p.q_len;
        int i = (u32)r / p.by_heads, position = work.kv_len - p.q_len + i;
        // Rows that fill up the tile see everything, so that they never make a full tile look masked.
        rows.end[g] = !real ? 0x7fffffff : p.causal ? min(max(position + 1, 0), work.kv_len) : work.kv_len;
        rows.start[g] = !real || p.window_left < 0 ? 0 : min(max(position - p.window_left, 0), rows.end[g]);
        rows.slope[g] = MASKS && real && p.alibi_slopes ? p.alibi_slopes[(kv_head - i) * p.heads_per_kv + r] : 0.0f;
        rows.position[g] = position;
    }
    return rows;
}

DEVICE void load_query(const DecodeParams& p, const Work& work, int kv_head, int warp_row, int lane, Query& q) {
#pragma unroll
    for (int g = 0; g < G; g++) {
        QueryRow row = query_row(p, work, kv_head, warp_row + g * 8 + lane / 4);
        auto load = [&](int panel, float (&x)[4]) {
            float4 v;
            if (code_bits(K_SCHEME) == 16) {  // a lane has pairs of dims 8 apart
                const float* at = row.q + panel * 16 + 2 * (lane % 4);
                float2 a = *(const float2*)at, b = *(const float2*)(at + 8);
                v = {a.x, a.y, b.x, b.y};
            } else {
                v = *(const float4*)(row.q + panel * 16 + 4 * (lane % 4));
            }
            x[0] = v.x * row.factor;
            x[1] = v.y * row.factor;
            x[2] = v.z * row.factor;
            x[3] = v.w * row.factor;
        };
        if constexpr (K_FLOAT) quantize_float(q, g, load);
        else quantize(q, g, load);
    }
}

// The channel scheme folds each page's scales into q', so q' itself waits in shared memory: rows from `first` to `end`, by so many threads.
DEVICE void store_query(const DecodeParams& p, const Work& work, int kv_head, u32 query, int first, int end, int thread, int threads) {
    for (int i = first * D + thread; i < end * D; i += threads) {
        QueryRow row = query_row(p, work, kv_head, i / D);
        sts32(query + (i / D * QUERY_STRIDE + i % D) * 4, float_bits(row.q[i % D] * row.factor));
    }
}

// What a warp knows of its rows of an item.
struct ItemRows {
    Rows rows;
    Query q;
    float largest_q[G];  // channel scheme: of q'
};

struct Warp {
    const DecodeParams& p;
    Feed& feed;
    Ring& ring;
    int lane, warp_row;
    bool producer;
    u32 query, scratch;

    // Of the queries that `store_query` left in shared memory.
    __device__ __forceinline__ void largest_queries(float (&largest)[G]) const {
#pragma unroll
        for (int g = 0; g < G; g++) {
            float x = 0.0f;
            for (int d = lane % 4; d < D; d += 4)
                x = fmaxf(x, fabsf(bits_float(lds32(query + ((warp_row + g * 8 + lane / 4) * QUERY_STRIDE + d) * 4))));
            largest[g] = quad_max(x);
        }
    }
    __device__ __forceinline__ void done_with_stage() {
        ring.release(lane);
        if (producer) feed.issue(p);
    }
    // K has been read, scratch too. V lies `k_bytes` behind it, or in the next stage, which says 0.
    __device__ __forceinline__ u32 done_with_keys(u32 stage, int k_bytes) {
        if (WHOLE) __syncwarp();
        else done_with_stage();
        return WHOLE ? stage + k_bytes : 0;
    }

    // A sealed page's scores, complete: planes and shifts' term are the page's own.
    __device__ __forceinline__ u32 channel_scores(const float (&largest_q)[G], float (&s)[G][16]) {
        u32 stage = ring.wait();
        float largest_shift = prepare_channels(stage + K_CODES, scratch, lane);
        Query q;
        float offset[G];
#pragma unroll
        for (int g = 0; g < G; g++)
            channel_query(q, g, query, warp_row + g * 8 + lane / 4, scratch, largest_q[g], largest_shift, lane, offset[g]);
        scores(stage, scratch, q, lane, s);
        u32 values = done_with_keys(stage, K_PART);
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int i = 0; i < 16; i++) s[g][i] = fmaf(s[g][i], i & 2 ? q.scale[g] * 0.0625f : q.scale[g], offset[g]);
        return values;
    }

    // An open page's K is int8 per token, in two stages.
    __device__ __forceinline__ u32 tail_scores(int tokens, float (&s)[G][16]) {
        Query q;
#pragma unroll
        for (int g = 0; g < G; g++) {
            quantize(q, g, [&](int panel, float (&x)[4]) {
                float4 v = lds128(query + ((warp_row + g * 8 + lane / 4) * QUERY_STRIDE + panel * 16 + 4 * (lane % 4)) * 4);
                x[0] = v.x;
                x[1] = v.y;
                x[2] = v.z;
                x[3] = v.w;
            });
        }
        Sums c[G][8] = {};
        u32 b[PANELS], values = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 stage = ring.wait();
            int first = half == 0 ? 0 : TAIL_PANELS, last = half == 0 ? TAIL_PANELS : PANELS;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                load_k8(stage, TILE, 8 * j, lane, b, first, last);
#pragma unroll
                for (int g = 0; g < G; g++) c[g][j] = dot_panels<true>(q.plane[g], b, first, last, true, c[g][j]);
            }
            if (half == 1) {
                u32 scales = stage + (last - first) * TILE * 16;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    int t = 8 * j + 2 * (lane % 4);
                    u32 x = lds32(scales + t * 2);
                    float k0 = t < tokens ? half_float(x & 0xffff) : 0.0f, k1 = t + 1 < tokens ? half_float(x >> 16) : 0.0f;
#pragma unroll
                    for (int g = 0; g < G; g++) {
                        s[g][2 * j] = (float)plane_sum(c[g][j], 0) * k0 * q.scale[g];
                        s[g][2 * j + 1] = (float)plane_sum(c[g][j], 1) * k1 * q.scale[g];
                    }
                }
                values = done_with_keys(stage, TAIL_SECOND);
            } else {
                done_with_stage();
            }
        }
        return values;
    }

    __device__ __forceinline__ void tile(const Work& work, int index, int kv_len, const ItemRows& item, State& state) {
        const Rows& rows = item.rows;
        const Query& q = item.q;
        int t0 = index * TILE, tokens = min(TILE, kv_len - t0);
        float s[G][16], scale[G];
        u32 values;
        if constexpr (CHANNEL) {
            values = work.is_tail(index) ? tail_scores(tokens, s) : channel_scores(item.largest_q, s);
#pragma unroll
            for (int g = 0; g < G; g++) scale[g] = 1.0f;
        } else {
            u32 stage = ring.wait();
            if constexpr (K_FLOAT) {
                float_scores(stage, q, lane, s);
            } else {
                prepare_k(stage, scratch, tokens, lane, [&](u32 at, int group) {
                    return scale_pair(at, p.k_scales, p.k_scale_strides, work, work.kv_head(feed.team), t0, lane, group);
                });
                scores(stage, scratch, q, lane, s);
            }
            values = done_with_keys(stage, K_PART);
#pragma unroll
            for (int g = 0; g < G; g++) scale[g] = q.scale[g];
        }
        int first = t0 + 2 * (lane % 4);
        if constexpr (MASKS) {
#pragma unroll
            for (int g = 0; g < G; g++) {
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    float x = s[g][i] * scale[g];
                    if (p.softcap_inner != 0.0f) x = softcap(x, p.softcap_inner, p.softcap_outer);
                    if (p.alibi_slopes) x = x + rows.slope[g] * (float)(first + 8 * (i / 2) + i % 2 - rows.position[g]);
                    s[g][i] = x;
                }
                scale[g] = 1.0f;
            }
        }
        bool full = true;
#pragma unroll
        for (int g = 0; g < G; g++) full &= rows.start[g] <= t0 && t0 + TILE <= rows.end[g];
        full = __all_sync(~0u, full);
        Rescale r;
        Pairs pairs;
        soften(s, scale, full, [&](int g, int i) {
            int t = first + 8 * (i / 2) + i % 2;
            return t >= rows.start[g] && t < rows.end[g];
        }, state, r, pairs);
        if (!WHOLE) values = ring.wait();
        if constexpr (V_FLOAT) {
            fold_float_values(values, tokens, s, r, lane, state);
        } else {
            fold_values(values, scratch, tokens, s, pairs, r, lane, [&](u32 at, int group) {
                return scale_pair(at, p.v_scales, p.v_scale_strides, work, work.kv_head(feed.team), t0, lane, group);
            }, state);
        }
        done_with_stage();
    }

    // An item's rows and queries. A team without an item of its own does as if it had the last one.
    __device__ __forceinline__ void enter(const Work& work, u32 shared, ItemRows& item) {
        int kv_head = min(work.kv_head(feed.team), p.num_kv_heads - 1);
        item.rows = visible(p, work, kv_head, warp_row, lane);
        if constexpr (CHANNEL) {
            if (work.has_items()) {
                query = shared + AT_TEAM_QUERIES + feed.team * QUERY_BYTES;
                store_query(p, work, kv_head, query, warp_row, warp_row + 8 * G, lane, 32);
                __syncwarp();
            } else {
                store_query(p, work, kv_head, query, 0, ROWS, threadIdx.x, THREADS);
                __syncthreads();
            }
            largest_queries(item.largest_q);
        } else {
            load_query(p, work, kv_head, warp_row, lane, item.q);
        }
    }

    // The team's tiles of a unit. Each segment's state goes where the join will look for the team's.
    __device__ __forceinline__ void take(const Work& work, const ItemRows& item, Join& join) {
        int index, end, kv_len = work.kv_len, step = work.step(), segment_tiles = work.takes() >= A_SPAN ? 1 << work.segment_shift : 1 << 30;
        work.share(p, feed.team, index, end);
        bool first = true;
#pragma unroll 1
        do {
            State state;
            state.clear();
            int until = end - index > segment_tiles ? index + segment_tiles : end;
#pragma unroll 1
            for (; index < until; index += step) {
                tile(work, index, kv_len, item, state);
                join.count(p);
            }
            join.segment(state, first, feed.team, warp_row, lane);
            first = false;
        } while (index < end);
        join.count(p);
    }
};

#if ATTN_PAGE == 0
#define ATTN_ROW_MAPS , const __grid_constant__ RowMaps maps
#else
#define ATTN_ROW_MAPS
#endif

extern "C" __global__ void __launch_bounds__(THREADS, ATTN_CTAS) attn_decode(const __grid_constant__ DecodeParams p ATTN_ROW_MAPS) {
    SHARED_MEMORY(shared, STAGE_ALIGN);
    int warp = threadIdx.x / 32, lane = lane_id(), team = warp / WR;
    u32 base = shared_address(shared);
    u32 barriers = base + AT_BARRIERS + team * STAGES * 16;
    if (threadIdx.x < TEAMS * STAGES) {
        u32 mine = base + AT_BARRIERS + threadIdx.x / STAGES * STAGES * 16 + threadIdx.x % STAGES * 8;
        barrier_init(mine, ATTN_BULK && PAGE != 0 ? 1 : 32);
        barrier_init(mine + STAGES * 8, WR * ARRIVALS);
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == THREADS - 1) touch_params(p, base + AT_KEPT);
    // Whatever comes before in the stream may still be running: nothing of it has been read so far.
    after_dependencies();
    Join join;
    join.start(shared);
    Cursor* cursors = (Cursor*)(shared + AT_CURSORS);
    Cursor first = take_share(p, cursors, (u32*)(shared + AT_STATES));
    Ring ring = {base + team * STAGES * STAGE_BYTES, barriers, 0, 0};
    bool producer = WR == 1 || warp % WR == 0;
    Feed feed;
    feed.cursor = cursors + 2 + team;
    feed.ring = ring;
    feed.team = team;
    feed.lane = lane;
#if ATTN_PAGE == 0
    feed.maps = &maps;
#endif
    if (producer) {
        feed.start(p, first);
        feed.issue(p);
    }
    __syncthreads();  // cursors[0], the join's books
    // The other stages wait for the first queries: behind as many copies, instructions and queries took 1.5 µs more.
    int ahead = 1;
    u32 scratch = base + AT_SCRATCH + warp * SCRATCH_BYTES;
    Warp self = {p, feed, ring, lane, warp % WR * 8 * G, producer, base + AT_QUERY, scratch};
    ItemRows item;
#pragma unroll 1
    for (int n = 0; cursors[n].is_valid(p); n ^= 1) {
        const Cursor& here = cursors[n];
        const Work& work = here.work;
        if (threadIdx.x == 0) {
            Cursor next = here;
            next.next(p);
            cursors[n ^ 1] = next;
        }
        if (here.is_fresh) self.enter(work, base, item);
#pragma unroll 1
        for (; ahead < STAGES; ahead++)
            if (producer) self.feed.issue(p);
        self.take(work, item, join);
        if (work.has_items()) join.item(p, work, team, self.warp_row, lane);
        else join.unit(p, here, cursors[n ^ 1]);
    }
    join.finish(p);
}
