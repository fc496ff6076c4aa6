// The parameter block of the decode kernels: `attn_cuda::DecodeParams` is the same bytes (asserted on both sides).
#pragma once

// A number to divide by, prepared by the host (`Divisor::new`): quotients of anything below 2^31.
struct Divisor {
    unsigned int divisor;
    unsigned int multiplier;
    unsigned int shift;
};

struct DecodeParams {
    // Queries [batch, q_len, num_q_heads, head_dim]; outputs likewise; lse f32 [batch, q_len, num_q_heads] or null.
    const void* q;
    void* out;
    float* lse;
    // Paged: the pool [page][kv_head][run]. Strided: K's and V's codes, and their f16 scales (null for schemes without).
    const unsigned char* k;
    const unsigned char* v;
    const unsigned short* k_scales;
    const unsigned short* v_scales;
    // Strided: bytes (codes) and elements (scales) from one sequence, KV head, token to the next.
    long long k_strides[3];
    long long v_strides[3];
    long long k_scale_strides[3];
    long long v_scale_strides[3];
    // Paged: u32 [batch][page_table_stride], u32 [batch] (tail pages; Int4 Channel only, else null).
    const unsigned int* page_table;
    const unsigned int* tail_pages;
    const int* kv_lens;               // [batch]
    const float* k_tensor_scales;     // [num_kv_heads] or null
    const float* v_tensor_scales;     // [num_kv_heads] or null
    const float* alibi_slopes;        // [num_q_heads], already multiplied by log2 e, or null
    // Workspace: partial states and zeroed counters (they return to zero); slots that short.cu hands over are zero themselves.
    float* states;                    // [slot][row][head_dim]
    float2* state_ml;                 // [slot][row]
    unsigned int* counters;           // [batch][num_kv_heads][row_blocks]
    float log2_scale;                 // fl(softmax_scale · log2 e)
    float softcap_inner;              // fl(2 / softcap), 0 without
    float softcap_outer;              // fl(softcap · log2 e)
    int batch;
    int num_q_heads;
    int num_kv_heads;
    int heads_per_kv;
    int q_len;
    int row_blocks;                   // ceil(heads_per_kv · q_len / rows per CTA)
    int page_table_stride;
    int max_slots;                    // per (sequence, KV head, row block): spans, or segments where a team takes a tile
    int window_left;                  // −1 without
    int causal;
    int tile_split;                   // whether there is so little work that a unit of it is a segment
    int page_bytes;                   // paged: of all KV heads
    Divisor by_heads;                 // heads_per_kv
    Divisor by_row_blocks;
    Divisor by_ctas;                  // the grid's
    Divisor by_sms;                   // CTAs over those that share an SM
    int appended;                     // new tokens of each sequence that the launch ahead writes, an append that waited for what is
                                      // ahead of it: all else may be read while it runs. 0: the launch ahead is any other
    int dtype;                        // of queries and outputs: 0 f32, 1 f16, 2 bf16
};

// How the copy engine finds rows of someone else's cache, [sequence][KV head][token][byte]: tensor maps, which the driver made.
struct RowMaps {
    alignas(64) long long k[16];
    alignas(64) long long v[16];
    int are_set;   // whether there are maps: not for every stride
};
static_assert(sizeof(RowMaps) == 320, "edit crates/attn-cuda/src/params.rs too");

#ifdef __CUDACC__
static __device__ __forceinline__ unsigned int operator/(unsigned int n, const Divisor& d) {
    return __umulhi(2 * n, d.multiplier) >> d.shift;
}
static __device__ __forceinline__ unsigned int ceil_div(unsigned int n, const Divisor& d) { return (n + d.divisor - 1) / d; }
#endif
