// merge_spans.cu: merges the states of spans of all shards of a sequence, in order, and finishes each row: section 10 of docs/arithmetic.md, and
// SpanStates::finish of attn-core, bit for bit.
//
// Grid      (rows / 4); 4 warps, a row each.
// Reads     (max, sum) and O of the states [state][row], as split_kv.cu leaves them with ATTN_SPANS; sinks, static scales of V.
// Writes    out, rounded once to f32, f16 or bf16; lse.
// Numerics  docs/arithmetic.md, sections 2, 6 and 7; subnormals flushed.
// Shared    none.
// Host      attn-cuda/src/native/merge_spans.rs; parameters in kernels/src/cuda/params.rs.
#include "attend/merge.cuh"

namespace attn {

constexpr int ROWS_OF_CTA = 4, VECTORS = (ROW_VECTORS + 31) / 32;  // float4s of a lane
constexpr int BATCH = 4;                                           // states whose loads are under way at once

extern "C" __global__ void __launch_bounds__(32 * ROWS_OF_CTA) attn_merge_spans(const __grid_constant__ MergeSpansParams p) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * ROWS_OF_CTA + warp_id();
    if (row >= p.rows) return;
    float m = MINUS_INFINITY, l = 0.0f;
    float4 o[VECTORS] = {};
#pragma unroll 1
    for (int base = 0; base < p.states; base += 32) {
        const float2 none = make_float2(MINUS_INFINITY, 0.0f), mine = base + lane < p.states ? p.max_sums[(base + lane) * p.rows_apart + row] : none;
        // Spans that the row does not see change nothing, and their O may be anything.
        u32 seen = __ballot_sync(~0u, mine.x > MINUS_INFINITY);
#pragma unroll 1
        while (seen) {
            int from[BATCH];
            float4 x[BATCH][VECTORS];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                from[i] = __ffs(seen) - 1;
                seen &= seen - 1;
                if (from[i] < 0) continue;
                const float4* const state = (const float4*)p.o + ((base + from[i]) * p.rows_apart + row) * ROW_VECTORS;
#pragma unroll
                for (int k = 0; k < VECTORS; k++) x[i][k] = state[min(lane + 32 * k, ROW_VECTORS - 1)];
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (from[i] < 0) continue;
                const float2 here = make_float2(__shfl_sync(~0u, mine.x, from[i]), __shfl_sync(~0u, mine.y, from[i]));
                const Factors w = merge_sums(m, l, here, false);
#pragma unroll
                for (int k = 0; k < VECTORS; k++) merge(o[k], x[i][k], w, false);
            }
        }
    }
    const int head = row % p.num_q_heads;
    Epilogue epilogue = {row_at(p.out, row, V_DIM, p.dtype),
                         p.lse ? p.lse + row : nullptr,
                         0.0f,
                         p.v_tensor_scales ? p.v_tensor_scales[head / p.heads_per_kv] : 1.0f,
                         p.sinks ? p.sinks[head] : MINUS_INFINITY,
                         p.dtype};
    epilogue.begin(m, l, lane == 0);
    epilogue.write_vectors<32>(o, lane);
}

}  // namespace attn
