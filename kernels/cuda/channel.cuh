// Int4 Channel: scores of a sealed page, whose scales and shifts belong to channels, and of the open page, which is int8 elsewhere.
#pragma once
#include "kv_pipeline.cuh"
#include "rows.cuh"

// Called once K and scratch have been read. Returns where V lies: `k_bytes` behind K, or 0 for the next stage.
template <class Done> DEVICE u32 done_with_keys(u32 stage, int k_bytes, Done done) {
    if (KV_ONE_STAGE) __syncwarp();
    else done();
    return KV_ONE_STAGE ? stage + k_bytes : 0;
}

// A page's scales and centred shifts in scratch, and the largest scale of each word (see `query_word`), those of four panels together.
struct Channels {
    u32 scratch;
    int exponent;  // E of the largest |shift|
};
DEVICE Channels prepare_channels(u32 params, u32 scratch, int lane) {
    float largest_shift = 0.0f;
#pragma unroll
    for (int first = 0; first < HEAD_DIM / 4; first += 32) {
        int word = first + lane;
        if (first + 32 > HEAD_DIM / 4 && word >= HEAD_DIM / 4) break;
        float4 raw = lds128(params + word * 16), scale, shift;
        auto channel = [&](float pair, float& scale, float& shift) {
            scale = half_float(float_bits(pair) & 0xffff);
            shift = fmaf(8.0f, scale, half_float(float_bits(pair) >> 16));
            largest_shift = fmaxf(largest_shift, fabsf(shift));
        };
        channel(raw.x, scale.x, shift.x);
        channel(raw.y, scale.y, shift.y);
        channel(raw.z, scale.z, shift.z);
        channel(raw.w, scale.w, shift.w);
        sts128(scratch + word * 16, scale);
        sts128(scratch + PAGE_SHIFTS + word * 16, shift);
        int panel = word / 4;
        sts32(scratch + PAGE_LARGEST + (panel / 4 * 16 + word % 4 * 4 + panel % 4) * 4,
              float_bits(fmaxf(fmaxf(scale.x, scale.y), fmaxf(scale.z, scale.w))));
    }
    __syncwarp();
    return {scratch, exponent(bits_float(warp_max(float_bits(largest_shift))))};
}

// Planes of q'·scale for this page, of the eight rows that lie in `query` as number `eight`; returns the shifts' term f32(Y)·2^-j. Warps
// that share tiles compute some of the planes each, and publish them.
DEVICE float channel_query(Query& q, int g, u32 query, int eight, const Channels& page, int exponent_q, const Team& team) {
    constexpr int OWN = PANELS / TILE_WARPS;
    int lane = team.lane, c = lane % 4;
    float bounds[2] = {};
#pragma unroll
    for (int four = 0; four < FOURS; four++) {
        float4 x = lds128(query_largest(query, eight, four, lane)), k = lds128(page.scratch + PAGE_LARGEST + (four * 4 + c) * 16);
        const float xs[4] = {x.x, x.y, x.z, x.w}, ks[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (four * 4 + i < PANELS) bounds[i % 2] = fmaxf(bounds[i % 2], xs[i] * ks[i]);
    }
    int e = plane_exponent(quad_max(fmaxf(bounds[0], bounds[1])));
    int j = min(max(20 - exponent_q - page.exponent, -100), 100);
    q.scale[g] = exp2i(-e);
    // What rounds to multiples of 2^-e: q'·scale is exact, so this is the product with 2^e of docs/arithmetic.md, rounded.
    float magic = bits_float(MAGIC_BITS + SPLIT - ((u32)e << 23)), up = exp2i(j);
    u32 y[2] = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int panel = SHARES_TILES ? team.warp * OWN + i : i;
        u32 word = (panel * 4 + c) * 16;
        float4 v = lds128(query_word(query, eight, panel, lane)), k = lds128(page.scratch + word), h = lds128(page.scratch + PAGE_SHIFTS + word);
        y[0] += float_bits(fmaf(v.x * h.x, up, MAGIC)) + float_bits(fmaf(v.y * h.y, up, MAGIC));
        y[1] += float_bits(fmaf(v.z * h.z, up, MAGIC)) + float_bits(fmaf(v.w * h.w, up, MAGIC));
        split_planes(float_bits(fmaf(v.x, k.x, magic)), float_bits(fmaf(v.y, k.y, magic)), float_bits(fmaf(v.z, k.z, magic)),
                     float_bits(fmaf(v.w, k.w, magic)), q.plane[g][i][0], q.plane[g][i][1]);
        if (SHARES_TILES) team.publish_plane(panel, q.plane[g][i][0], q.plane[g][i][1]);
    }
    int sum = quad_sum((int)(y[0] + y[1] - (u32)(OWN * 4) * MAGIC_BITS));
    if constexpr (SHARES_TILES) {
        static_assert(!K_PER_CHANNEL || !SHARES_TILES || ROW_GROUPS == 1 && PANELS % TILE_WARPS == 0, "team.cuh has room for eight rows");
        team.publish_shift(sum);
        team.barrier();
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) team.gather_plane(panel, q.plane[g][panel][0], q.plane[g][panel][1]);
        sum = team.gather_shift();
    }
    centre_codes(q, g);
    return (float)sum * exp2i(-j);
}

// A sealed page's scores, complete: planes and shifts' term are the page's own.
template <class Done> DEVICE u32 channel_scores(Ring& ring, u32 query, u32 scratch, int warp_row, const int (&exponent_q)[ROW_GROUPS], const Team& team,
                                                float (&s)[ROW_GROUPS][SCORES], Done done) {
    int lane = team.lane;
    u32 stage = ring.wait();
    Channels page = prepare_channels(stage + K_CODES, scratch, lane);
    Query q;
    float offset[ROW_GROUPS];
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) offset[g] = channel_query(q, g, query, warp_row / 8 + g, page, exponent_q[g], team);
    scores(stage, PreparedK{scratch}, q, team, s);
    u32 values = done_with_keys(stage, K_BYTES_OF_BLOCK, done);
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int i = 0; i < SCORES; i++) s[g][i] = fmaf(s[g][i], i & 2 ? q.scale[g] * 0.0625f : q.scale[g], offset[g]);
    return values;
}

// An open page's K is int8 per token, in two stages.
template <class Done> DEVICE u32 tail_scores(Ring& ring, u32 query, int warp_row, int tokens, const Team& team, float (&s)[ROW_GROUPS][SCORES], Done done) {
    int lane = team.lane;
    Query q;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        float x[PANELS][4], largest = load_row([&](int panel, float (&to)[4]) {
            float4 v = lds128(query_word(query, warp_row / 8 + g, panel, lane));
            to[0] = v.x;
            to[1] = v.y;
            to[2] = v.z;
            to[3] = v.w;
        }, x);
        quantize(q, g, x, largest);
    }
    Sums c[ROW_GROUPS][TOKENS / 8] = {};
    u32 b[PANELS], values = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 stage = ring.wait();
        int first = half == 0 ? 0 : TAIL_PANELS, last = half == 0 ? TAIL_PANELS : PANELS;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            load_k8(stage, TILE, team.token() + 8 * j, lane, b, first, last);
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) c[g][j] = dot_panels<true>(q.plane[g], b, first, last, true, c[g][j]);
        }
        if (half == 1) {
            u32 scales = stage + (last - first) * TILE * 16;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
                int t = team.token() + 8 * j + 2 * (lane % 4);
                u32 x = lds32(scales + t * 2);
                float k0 = t < tokens ? half_float(x & 0xffff) : 0.0f, k1 = t + 1 < tokens ? half_float(x >> 16) : 0.0f;
#pragma unroll
                for (int g = 0; g < ROW_GROUPS; g++) {
                    s[g][2 * j] = (float)plane_sum(c[g][j], 0) * k0 * q.scale[g];
                    s[g][2 * j + 1] = (float)plane_sum(c[g][j], 1) * k1 * q.scale[g];
                }
            }
            values = done_with_keys(stage, TAIL_SECOND, done);
        } else {
            done();
        }
    }
    return values;
}
