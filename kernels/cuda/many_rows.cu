// many_rows.cu: split-KV decode attention for many query rows per KV head (sm_90a), on tensor cores.
//
// Grid      persistent, (SMs * CTAs per SM); ROW_WARPS warps with 8 rows each, a producer warp and a warp that converts parameters.
// Tile      all warps of a CTA attend the same tiles, each for its own rows, so a tile is read and its parameters are converted once for up
//           to 64 rows. In split_kv.cu each team has its own tiles and its own ring.
// Reads     q; pages; page table, lengths.
// Writes    out, lse; partials and arrival counts in the workspace.
// Numerics  docs/arithmetic.md, the same bits as split_kv.cu.
// Shared    AT_… below.
// Host      kernels/src/cuda: select.rs (configuration), split.rs (launch), smem.rs.
#include "many_rows_merge.cuh"

static_assert(ROW_GROUPS == 1 && INTEGER && !K_PER_CHANNEL && PAGE != 0 && PAGE <= TILE && HEAD_DIM % 32 == 0, "integers in pages of at most a tile");
static_assert(STAGES <= 8 && THREADS <= 512, "room in shared memory");

constexpr int AT_STATES = STAGES * TILE_STAGE_BYTES, AT_BARRIERS = AT_STATES + STATE_BYTES;
constexpr int AT_SHARED_STATE = AT_BARRIERS + (SIGNALS * STAGES * 8 + 15) / 16 * 16, AT_SUMS = AT_SHARED_STATE + 80, AT_PROGRESS = AT_SUMS + 128;
constexpr int AT_PLANES = AT_PROGRESS + ROW_WARPS * 64, SHARED_BYTES = AT_PLANES + WORKERS * PANELS * 8;
static_assert(AT_PLANES % 16 == 0 && AT_STATES % 16 == 0, "vectors");
static_assert(sizeof(SharedState) <= 80 && sizeof(Progress) <= 64, "room in shared memory");

extern "C" __device__ const int attn_shared_bytes = SHARED_BYTES;
extern "C" __device__ const int attn_threads = THREADS;

// Query row lane/4 of a warp: the tokens it sees and what its scores need.
struct Row {
    float scale;        // 2^-e
    int centre[K_GROUPS];  // see Query
    int start, end;     // the row sees tokens [start, end)
    float slope;
    int position;
};

// Prepares a row of the work item; its query planes go to `planes` in shared memory.
DEVICE Row enter_row(const DecodeParams& p, const Work& work, int row, int lane, u32 planes) {
    Query q;
    int r = work.row_block * ROWS + row, head = work.kv_head * p.heads_per_kv + r % p.heads_per_kv;
    bool real = r < p.heads_per_kv * p.q_len;
    int i = r / p.heads_per_kv, position = work.kv_len - p.q_len + i;
    float x[PANELS][4], largest = load_row(query_row(p, work, work.kv_head, row), lane, x);
    quantize(q, 0, x, largest);
#pragma unroll
    for (int i = 0; i < PANELS; i += 2)
        sts128(planes + i / 2 * WORKERS * 16, {bits_float(q.plane[0][i][0]), bits_float(q.plane[0][i][1]),
                                               bits_float(q.plane[0][i + 1][0]), bits_float(q.plane[0][i + 1][1])});
    // Padding rows see everything, so that they never make a full tile count as masked.
    int end = !real ? 0x7fffffff : p.causal ? min(max(position + 1, 0), work.kv_len) : work.kv_len;
    int start = !real || p.window_left < 0 ? 0 : min(max(position - p.window_left, 0), end);
    Row seen = {};
    seen.scale = q.scale[0];
    seen.start = start;
    seen.end = end;
    seen.slope = HAS_SCORE_MODS && real && p.alibi_slopes ? p.alibi_slopes[head] : 0.0f;
    seen.position = position;
    if constexpr (K_INT4) {
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) seen.centre[group] = q.centre[0][group];
    }
    return seen;
}

// The converting warp: converts the parameters of every tile of the CTA's split.
DEVICE void convert(const DecodeParams& p, Work work, u32 end, Ring ring, int lane) {
#pragma unroll 1
    for (; work.b < p.batch && work.offset < end; work.next(p)) {
#pragma unroll 1
        for (int tile = work.first_tile(); tile < work.end_tile(); tile++) {
            int tokens = min(TILE, work.kv_len - tile * TILE);
            u32 at = ring.at();
            ring.wait(FULL);
            StoredV<NoRows> values = {at + AT_V, tokens};
            prepare_k(StoredK<NoRows>{at, tokens}, at + AT_SCRATCH_K, lane);
            prepare_v(values, at + AT_SCRATCH_V, lane);
            const VScales& v = values.v;
            if (lane == 0) {
#pragma unroll
                for (int group = 0; group < V_GROUPS; group++)
                    sts64(at + AT_DOWN + group * 8, v.down[group], V_INT4 ? v.shift_down[group] : 0.0f);
            }
            ring.arrive(READY, lane);
            ring.arrive(EMPTY, lane);
            ring.advance();
        }
    }
}

// Both products use this many accumulators in turn, because MMAs into the same accumulator are a dependent chain.
constexpr int SIDE = 4;

// `scores` for 8-bit codes with one quantization group.
DEVICE void scores_side(u32 stage, u32 scratch, const Query& q, int lane, float (&s)[ROW_GROUPS][16]) {
#pragma unroll
    for (int j0 = 0; j0 < 8; j0 += SIDE) {
        Sums c[SIDE] = {};
#pragma unroll
        for (int panel = 0; panel < PANELS; panel += 4) {
            u32 b[SIDE][4];
#pragma unroll
            for (int j = 0; j < SIDE; j++) {
                int token = 8 * (j0 + j);
                ldmatrix_x4(b[j], stage + token / BLOCK * K_STRIDE + ((panel + lane / 8) * BLOCK + token % BLOCK + lane % 8) * 16);
            }
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const u32(&x)[K_FLOAT ? 4 : 2] = q.plane[0][(panel + i) % PANELS], (&y)[K_FLOAT ? 4 : 2] = q.plane[0][(panel + i + 1) % PANELS];
#pragma unroll
                for (int j = 0; j < SIDE; j++) c[j] = mma_s8_k32(c[j], x[0], x[1], y[0], y[1], b[j][i], b[j][i + 1]);
            }
        }
#pragma unroll
        for (int j = 0; j < SIDE; j++) {
            float s0 = (float)plane_sum(c[j], 0), s1 = (float)plane_sum(c[j], 1);
            if constexpr (K_SCHEME != INT8_TENSOR) {
                uint2 k = lds64(scratch + (8 * (j0 + j) + 2 * (lane % 4)) * 4);
                s0 = s0 * bits_float(k.x);
                s1 = s1 * bits_float(k.y);
            }
            s[0][2 * (j0 + j)] = s0;
            s[0][2 * (j0 + j) + 1] = s1;
        }
    }
}

// `fold_prepared` for 8-bit codes with one quantization group.
DEVICE void fold_side(u32 stage, u32 scratch, const VScales& v, const float (&p)[ROW_GROUPS][16], const Rescale& r, const Team& team, State& state) {
    rescale(state, r);
    Weights w;
    Pairs none;
    weigh(p[0], none.p14[0], scratch, 0, v, team, w);
    float down = v.down[0] * r.beta[0];
#pragma unroll
    for (int j0 = 0; j0 < HEAD_DIM / 8; j0 += SIDE) {
        Sums c[SIDE] = {};
        u32 b[SIDE][4];
#pragma unroll
        for (int j = 0; j < SIDE; j++) load_v8(stage, j0 + j, team.lane, b[j]);
#pragma unroll
        for (int j = 0; j < SIDE; j++)
            c[j] = mma_u8s8_k32(c[j], w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], b[j][0], b[j][1]);
#pragma unroll
        for (int j = 0; j < SIDE; j++)
            c[j] = mma_u8s8_k32(c[j], w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], b[j][2], b[j][3]);
#pragma unroll
        for (int j = 0; j < SIDE; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                state.o[0][j0 + j][i] = fmaf((float)(c[j].x[i] * 256 + c[j].x[i + 2]), down, state.o[0][j0 + j][i]);
    }
}

// Attends one tile for a warp's rows and folds it into their state.
DEVICE void fold_tile(const DecodeParams& p, const Ring& ring, int t0, const Row& row, int thread, int lane, State& state) {
    float s[ROW_GROUPS][16], scale[ROW_GROUPS] = {row.scale};
    Team team = {0, 0, lane};
    ring.wait(READY);
    Query q;
    if constexpr (K_INT4) {
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) q.centre[0][group] = row.centre[group];
    }
#pragma unroll
    for (int i = 0; i < PANELS; i += 2) {
        float4 x = lds128(ring.stages + AT_PLANES + thread * 16 + i / 2 * WORKERS * 16);
        q.plane[0][i][0] = float_bits(x.x);
        q.plane[0][i][1] = float_bits(x.y);
        q.plane[0][i + 1][0] = float_bits(x.z);
        q.plane[0][i + 1][1] = float_bits(x.w);
    }
    u32 at = ring.at();
    constexpr bool K_SIDE = code_bits(K_SCHEME) == 8 && K_GROUPS == 1 && PANELS % 4 == 0;
    constexpr bool V_SIDE = code_bits(V_SCHEME) == 8 && V_GROUPS == 1 && HEAD_DIM / 8 % SIDE == 0;
    if constexpr (K_SIDE) scores_side(at, at + AT_SCRATCH_K, q, lane, s);
    else scores(at, PreparedK{at + AT_SCRATCH_K}, q, team, s);
    int first = t0 + 2 * (lane % 4);
    if constexpr (HAS_SCORE_MODS) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float x = s[0][i] * scale[0];
            if (p.softcap_inner != 0.0f) x = softcap(x, p.softcap_inner, p.softcap_outer);
            if (p.alibi_slopes) x = x + row.slope * (float)(first + 8 * (i / 2) + i % 2 - row.position);
            s[0][i] = x;
        }
        scale[0] = 1.0f;
    }
    bool full = __all_sync(~0u, row.start <= t0 && t0 + TILE <= row.end);
    Rescale r;
    Pairs pairs;
    float tops[ROW_GROUPS];
    row_max(s, scale, full, [&](int, int i) {
        int t = first + 8 * (i / 2) + i % 2;
        return t >= row.start && t < row.end;
    }, tops);
    softmax_tile(s, scale, full, tops, state.m, r, pairs);
    add_weights(state, 0, quad_sum(r.weights[0]), r);
    VScales v;
#pragma unroll
    for (int group = 0; group < V_GROUPS; group++) {
        uint2 x = lds64(at + AT_DOWN + group * 8);
        v.down[group] = bits_float(x.x);
        v.shift_down[group] = bits_float(x.y);
    }
    if constexpr (V_SIDE) fold_side(at + AT_V, at + AT_SCRATCH_V, v, s, r, team, state);
    else fold_prepared(at + AT_V, at + AT_SCRATCH_V, v, s, pairs, r, team, state);
    ring.arrive(EMPTY, lane);
}

// Attends the CTA's split for the rows of one warp, and merges at the ends of segments and work units.
DEVICE void work_through(const DecodeParams& p, const Work& first, u32 end, Ring ring, int worker, int lane, u8* shared) {
    Progress& progress = *(Progress*)(shared + AT_PROGRESS + worker * 64);
    if (lane == 0) progress = {first, end, 0, 0, 0};
    __syncwarp();
    Merge merge = {shared + AT_STATES, (SharedState*)(shared + AT_SHARED_STATE), progress, worker * 32 + lane, lane};
    Row row = {};
    bool is_new = true;
#pragma unroll 1
    while (progress.work.b < p.batch && progress.work.offset < progress.end) {
        if (is_new) row = enter_row(p, progress.work, merge.row(), lane, ring.stages + AT_PLANES + merge.thread * 16);
        State state;
        state.clear();
        bool is_first = true;
        int tile = progress.work.first_tile();
#pragma unroll 1
        while (tile < progress.work.end_tile()) {
            fold_tile(p, ring, tile * TILE, row, merge.thread, lane, state);
            ring.advance();
            tile++;
            if ((tile & (progress.work.segment_tiles - 1)) == 0 && tile < progress.work.end_tile()) {
                merge.segment(state, is_first);
                is_first = false;
                state.clear();
            }
        }
        merge.unit(p, state, is_first);
        Work next = progress.work;
        next.next(p);
        __syncwarp();
        if (lane == 0) progress.work = next;
        __syncwarp();
        is_new = next.unit == 0;
    }
    merge.end(p);
}

// The role of a warp: below ROW_WARPS it has rows, ROW_WARPS is the producer, above it converts parameters. An SM's scheduler serves every
// fourth warp slot, and a CTA's warps lie in slots in any order. With eight warps the two without rows are therefore chosen by their slots,
// so that two CTAs load the schedulers evenly.
DEVICE int rank(int warp, u32* slots) {
    if (ROW_WARPS != 6) return warp;
    u32 slot = warp_slot();
    if (lane_id() == 0) slots[warp] = slot;
    __syncthreads();
    u32 seen = 0, first = ~0u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 other = slots[warp / 4 * 4 + i];
        seen |= 1 << other % 4;
        first = min(first, other);
        if (i == warp % 4) slot = other;
    }
    __syncthreads();
    int of_four = seen == 15 ? (slot + warp / 4 + first / 8 * 2) % 4 : warp % 4;
    return of_four < 3 ? warp / 4 * 3 + of_four : 6 + warp / 4;
}

extern "C" __global__ void __launch_bounds__(THREADS, ATTN_CTAS) attn_decode(const __grid_constant__ DecodeParams p) {
    SHARED_MEMORY(shared, 128);
    int warp = threadIdx.x / 32, lane = lane_id();
    u32 base = shared_address(shared);
    if (threadIdx.x < SIGNALS * STAGES) {
        int signal = threadIdx.x % SIGNALS;
        barrier_init(base + AT_BARRIERS + threadIdx.x * 8, signal == FULL ? 1 : signal == READY ? ARRIVALS : (ROW_WARPS + 1) * ARRIVALS);
        barrier_init_fence();
    }
    u32* sums = (u32*)(shared + AT_SUMS);
    int role = rank(warp, sums);
    after_dependencies();  // nothing that an earlier launch writes has been read so far
    u32 end;
    Work work = first_work(p, end, sums);  // its barriers make the mbarriers visible too
    Ring ring = {base, base + AT_BARRIERS, 0, 0};
    if (role == ROW_WARPS) produce(p, work, end, ring, lane);
    else if (role > ROW_WARPS) convert(p, work, end, ring, lane);
    else work_through(p, work, end, ring, role, lane, shared);
}
