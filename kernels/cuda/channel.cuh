// Int4 Channel: scores of a sealed page, whose scales and shifts belong to channels, and of the open page, which is int8 elsewhere.
#pragma once
#include "feed.cuh"
#include "rows.cuh"

// K has been read, scratch too. V lies `k_bytes` behind it, or in the next stage, which says 0.
template <class Done> DEVICE u32 done_with_keys(u32 stage, int k_bytes, Done done) {
    if (WHOLE) __syncwarp();
    else done();
    return WHOLE ? stage + k_bytes : 0;
}

// A sealed page's scores, complete: planes and shifts' term are the page's own.
template <class Done> DEVICE u32 channel_scores(Ring& ring, u32 query, u32 scratch, int warp_row, const float (&largest_q)[G], const Team& team,
                                                float (&s)[G][SCORES], Done done) {
    int lane = team.lane;
    u32 stage = ring.wait();
    float largest_shift = prepare_channels(stage + K_CODES, scratch, lane);
    Query q;
    float offset[G];
#pragma unroll
    for (int g = 0; g < G; g++)
        channel_query(q, g, query, warp_row + g * 8 + lane / 4, scratch, largest_q[g], largest_shift, lane, offset[g]);
    scores(stage, PreparedK{scratch}, q, team, s);
    u32 values = done_with_keys(stage, K_PART, done);
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < SCORES; i++) s[g][i] = fmaf(s[g][i], i & 2 ? q.scale[g] * 0.0625f : q.scale[g], offset[g]);
    return values;
}

// An open page's K is int8 per token, in two stages.
template <class Done> DEVICE u32 tail_scores(Ring& ring, u32 query, int warp_row, int tokens, const Team& team, float (&s)[G][SCORES], Done done) {
    int lane = team.lane;
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
    Sums c[G][TOKENS / 8] = {};
    u32 b[PANELS], values = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 stage = ring.wait();
        int first = half == 0 ? 0 : TAIL_PANELS, last = half == 0 ? TAIL_PANELS : PANELS;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            load_k8(stage, TILE, team.token() + 8 * j, lane, b, first, last);
#pragma unroll
            for (int g = 0; g < G; g++) c[g][j] = dot_panels<true>(q.plane[g], b, first, last, true, c[g][j]);
        }
        if (half == 1) {
            u32 scales = stage + (last - first) * TILE * 16;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
                int t = team.token() + 8 * j + 2 * (lane % 4);
                u32 x = lds32(scales + t * 2);
                float k0 = t < tokens ? half_float(x & 0xffff) : 0.0f, k1 = t + 1 < tokens ? half_float(x >> 16) : 0.0f;
#pragma unroll
                for (int g = 0; g < G; g++) {
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
