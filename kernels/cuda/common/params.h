// The parameter blocks of the kernels. Generated from kernels/src/cuda/params.rs: edit that file, then run
// `ATTN_UPDATE=1 cargo test -p attn-kernels`.
#pragma once
#include "common/ptx.cuh"

namespace attn {

// How K or V is stored: the values of ATTN_K and ATTN_V.
enum Scheme { F16, BF16, FP8, INT8_TOKEN, INT8_GROUP, INT8_TENSOR, INT4, ROTATED_INT8, ROTATED_INT4 };

// Which tokens an append stores where keys lack centres: the values of CentreTokens.
enum CentreTokens { ALL_TOKENS, EACH_WITH_CENTRES, FIRST_TOKENS, OF_FIRST_TILES, BEHIND_FIRST_TILES };

// A divisor prepared by the host; `divmod.cuh` divides numbers below 2^31 by it: `(2n · multiplier) >> 32 >> shift`.
struct FastDivmod {
    unsigned int divisor;                      // Number to divide by.
    unsigned int multiplier;                   // 2^(31 + shift) / divisor, rounded up.
    unsigned int shift;                        // log2 of the first power of two from the divisor on.
};
static_assert(sizeof(FastDivmod) == 12, "params.rs");

// Query tokens of a sequence that are attended together.
struct QueryBlock {
    int sequence;                              // The sequence.
    int first;                                 // The first token's place among the query tokens of all sequences.
    int tokens;                                // How many they are.
    int behind;                                // How many query tokens of the sequence come after them.
};
static_assert(sizeof(QueryBlock) == 16, "params.rs");

// Parameters of the decode kernels. Addresses are device addresses, 0 for null.
struct DecodeParams {
    const void* q;                             // Queries [query tokens, num_q_heads, head_dim].
    void* out;                                 // Outputs [query tokens, num_q_heads, head_dim].
    float* lse;                                // f32 [query tokens, num_q_heads], or null.
    const unsigned char* k;                    // Pages: the pool [page][kv_head][run]. Rows: codes of K.
    const unsigned char* v;                    // Rows: codes of V.
    const unsigned short* k_scales;            // Rows: f16 scales of K, or null for schemes without scales.
    const unsigned short* v_scales;            // Rows: f16 scales of V, or null for schemes without scales.
    long long k_strides[3];                    // Rows: bytes from one sequence or page, KV head, token of K's codes to the next.
    long long v_strides[3];                    // Rows: bytes from one sequence or page, KV head, token of V's codes to the next.
    long long k_scale_strides[3];              // Rows: elements from one sequence or page, KV head, token of K's scales to the next.
    long long v_scale_strides[3];              // Rows: elements from one sequence or page, KV head, token of V's scales to the next.
    const unsigned int* page_table;            // Pages and pages of rows: u32 [batch][page_table_stride].
    const unsigned int* residual_pages;        // Pages: u32 [batch][F + residual_ring], where F pages, or one, hold a tile: the residual page of home page i at i below F, else at F + i mod residual_ring. Null where no scheme has a window.
    const int* kv_lens;                        // i32 [batch].
    const float* k_tensor_scales;              // f32 [num_kv_heads], or null.
    const float* v_tensor_scales;              // f32 [num_kv_heads], or null.
    const float* alibi_slopes;                 // f32 [num_q_heads], each multiplied by log2 e, or null.
    const float* sinks;                        // f32 [num_q_heads], or null.
    const QueryBlock* query_blocks;            // [batch], or null where sequence b has the query tokens from b · q_len on. Blocks without tokens come last.
    float* partial_o;                          // Workspace: O of the partials [partial][row][head_dim]. Zero between launches where low_latency.cu merges through global memory.
    float2* partial_max_sum;                   // Workspace: maximum and sum of the partials [partial][row]. Zero between launches as partial_o.
    unsigned long long* counters;              // Workspace: arrival counts [query block][num_kv_heads][row_blocks], zero between launches.
    unsigned long long row_states_at;          // many_rows.cu: where in partial_o the states of rows begin that a warpgroup attends, in floats.
    float log2_scale;                          // fl(softmax_scale · log2 e).
    float softcap_inner;                       // fl(2 / softcap), or 0 without a soft cap.
    float softcap_outer;                       // fl(softcap · log2 e).
    int batch;                                 // Query blocks: sequences, where query_blocks is null.
    int num_q_heads;                           // Query heads.
    int num_kv_heads;                          // KV heads.
    int heads_per_kv;                          // Query heads per KV head.
    int q_len;                                 // Query tokens of a block, at most.
    int row_blocks;                            // ceil(heads_per_kv · q_len / rows per CTA).
    int page_table_stride;                     // Entries of the page table per sequence.
    int max_partials;                          // Places for partials per work item (query block, KV head, row block).
    int window_left;                           // Tokens to the left of the query that it sees, or -1 without a window.
    int chunk;                                 // Tokens of a chunk, of which a query sees its own alone, or 0 without chunks.
    int causal;                                // Whether the mask is causal.
    int partial_per_segment;                   // low_latency.cu: whether a partial is always a segment's state; else a span's, where sequences are as long as planned.
    int page_stride;                           // Pages: bytes from one page to the next.
    FastDivmod heads_per_kv_divmod;            // Divides by heads_per_kv.
    FastDivmod row_blocks_divmod;              // Divides by row_blocks.
    FastDivmod ctas_divmod;                    // Divides by the CTAs of the grid's first axis.
    FastDivmod sms_divmod;                     // Divides by the grid's CTAs over those that share an SM.
    int appended;                              // New tokens of each sequence, if the launch ahead is an append that writes them: all else may be read while it runs. Else 0.
    int dtype;                                 // Number format of queries and outputs: Dtype.
    unsigned int residual_ring;                // Slots of a sequence that the residual pages of its last home pages share, a power of two; 0 where no scheme has a window.
    unsigned int span_rows;                    // ATTN_SPANS: rows of a span in partial_o and partial_max_sum, which then are the caller's, [span][row].
    const int* tokens_after;                   // ATTN_SPANS: i32 [batch], tokens of each sequence that follow those of kv_lens in other shards; null for none.
    const int* tokens_before;                  // ATTN_SPANS: i32 [batch], tokens of each sequence that lie in shards ahead; null for none.
    const unsigned short* centres;             // Pages: centres of K, [row][num_kv_heads][2][head_dim] in bf16, which keys lack; null: none.
    const unsigned int* centre_rows;           // With centres: u32, the row of each sequence's centres; null: the sequence's number.
    unsigned long long centre_stride;          // Elements from one row of centres to the next.
    int centre_rows_stride;                    // Entries of centre_rows from one sequence to the next.
    int rounds_queries;                        // many_rows.cu, pages of dequantize.cu: whether queries are rounded to f16, as K was; f32 queries are the sum of two f16 elsewhere.
    int fine_window;                           // many_rows.cu, pages of dequantize.cu: tiles that a row reads with residuals; 0: none.
    unsigned int fine_pages;                   // many_rows.cu, pages of dequantize.cu: from a tile's page to that with residuals.
};
static_assert(sizeof(DecodeParams) == 432, "params.rs");

// Parameters of `query_blocks.cu`.
struct QueryBlocksParams {
    const int* cu_seqlens_q;                   // i32 [batch + 1]: the first query token of each sequence, and the end of the last one.
    QueryBlock* blocks;                        // List to fill; entries behind the blocks have no tokens.
    int batch;                                 // Sequences.
    int num_blocks;                            // Entries of the list.
    int block_tokens;                          // Query tokens of a block, at most.
    int query_tokens;                          // Query tokens that there are at most.
};
static_assert(sizeof(QueryBlocksParams) == 32, "params.rs");

// Tensor maps of rows [sequence or page][KV head][token][byte], which the driver encoded.
struct RowMaps {
    alignas(64) long long k[16];               // Map of K's codes.
    long long v[16];                           // Map of V's codes.
    int are_set;                               // Whether the maps are set; some strides have none.
};
static_assert(sizeof(RowMaps) == 320, "params.rs");

// Parameters of `append.cu`.
struct AppendParams {
    const void* k;                             // New K [token][num_kv_heads][head_dim].
    const void* v;                             // New V [token][num_kv_heads][head_dim].
    unsigned char* pool;                       // Pages [page][kv_head][run].
    const unsigned int* page_table;            // u32 [batch][page_table_stride].
    const unsigned int* residual_pages;        // u32 [batch][F + residual_ring], as in DecodeParams; with slots u32 [tokens], NO_PAGE for none. Null where no scheme has a window.
    const int* kv_lens;                        // i32 [batch], the new tokens included.
    const long long* slots;                    // i64 [tokens]: where each token goes, page * page_size + token of the page, or negative for nowhere. Null: behind its sequence's tokens.
    const float* k_tensor_scales;              // f32 [num_kv_heads], or null.
    const float* v_tensor_scales;              // f32 [num_kv_heads], or null.
    unsigned short* centres;                   // By slots: centres of K, [row][num_kv_heads][2][head_dim] in bf16, which are taken off keys; null: none.
    const unsigned int* centre_rows;           // With centres: u32 [tokens], the row of the centres of the token's sequence.
    const int* centre_positions;               // With centres: i32 [tokens], the token's number in its sequence. The first one's key makes the first centre.
    unsigned long long centre_stride;          // Elements from one row of centres to the next.
    long long k_token_stride;                  // Elements from one token of K to the next.
    long long v_token_stride;                  // Elements from one token of V to the next.
    unsigned long long page_stride;            // Bytes from one page to the next.
    const void* cos_sin;                       // With rotary positions: [num_positions][rotary_dim], the cosines of a position's pairs, then their sines.
    const long long* positions;                // With rotary positions: i64 [tokens]; null: a token's position is its number in its sequence.
    const void* q;                             // With rotary positions: queries [tokens][num_q_heads][head_dim], in K's number format, or null.
    void* q_out;                               // Where rotated queries go.
    long long q_token_stride;                  // Elements from one token of q to the next.
    long long q_out_token_stride;              // Elements from one token of q_out to the next.
    long long num_positions;                   // Rows of cos_sin.
    int tokens;                                // New tokens of each sequence; those of sequence b start at b * tokens. With slots: all new tokens.
    int batch;                                 // Sequences.
    int num_kv_heads;                          // KV heads.
    int page_table_stride;                     // Entries of the page table per sequence.
    int dtype;                                 // Number format of K and V: Dtype.
    int is_followed;                           // Whether the next launch is a decode that knows which pages this one writes.
    unsigned int residual_ring;                // Slots of a sequence that the residual pages of its last home pages share, a power of two; 0 where no scheme has a window.
    int num_q_heads;                           // Query heads that are rotated.
    int rotary_dim;                            // Elements of a head that are rotated, a multiple of 4.
    int cos_sin_dtype;                         // Number format of cos_sin: Dtype.
    int is_interleaved;                        // Whether pairs are neighbours; else half of rotary_dim lies between them.
    int centre_tokens;                         // With centres: which tokens are stored, CentreTokens.
};
static_assert(sizeof(AppendParams) == 232, "params.rs");

// Parameters of `centre.cu`.
struct CentreParams {
    const unsigned char* pool;                 // Pages [page][kv_head][run].
    unsigned short* centres;                   // Centres of K, [row][num_kv_heads][2][head_dim] in bf16: the first ones are read, the second ones written.
    const unsigned int* tiles;                 // First tiles, u32 [9] of each: the row of its centres, up to four home pages, and their residual pages, which are not read where K keeps none. Null: those of which there is the last token, each in one page, whose number is the row of its centres.
    unsigned long long page_stride;            // Bytes from one page to the next.
    unsigned long long centre_stride;          // Elements from one row of centres to the next.
    const long long* slots;                    // Without tiles: as in AppendParams.
    const unsigned int* centre_rows;           // Without tiles: as in AppendParams.
    const int* centre_positions;               // Without tiles: as in AppendParams.
    int tokens;                                // Without tiles: tokens.
};
static_assert(sizeof(CentreParams) == 72, "params.rs");

// Parameters of `import.cu`.
struct ImportParams {
    const unsigned char* k;                    // Rows of K.
    const unsigned char* v;                    // Rows of V.
    const unsigned short* k_scales;            // f16 scales of K, or null for schemes without scales.
    const unsigned short* v_scales;            // f16 scales of V, or null for schemes without scales.
    long long k_strides[3];                    // Bytes from one sequence, KV head, token of K to the next.
    long long v_strides[3];                    // Bytes from one sequence, KV head, token of V to the next.
    long long k_scale_strides[3];              // Elements from one sequence, KV head, token of K's scales to the next.
    long long v_scale_strides[3];              // Elements from one sequence, KV head, token of V's scales to the next.
    unsigned char* pool;                       // Pages [page][kv_head][run].
    const unsigned int* page_table;            // u32 [batch][page_table_stride].
    const int* kv_lens;                        // i32 [batch].
    int num_kv_heads;                          // KV heads.
    int page_table_stride;                     // Entries of the page table per sequence.
};
static_assert(sizeof(ImportParams) == 160, "params.rs");

// Parameters of `export.cu`.
struct ExportParams {
    void* k;                                   // Rows of K [token][num_kv_heads][head_dim], or null.
    void* v;                                   // Rows of V [token][num_kv_heads][head_dim], or null.
    const unsigned char* pool;                 // Pages [page][kv_head][run].
    const unsigned int* page_table;            // u32 [batch][page_table_stride].
    const unsigned int* residual_pages;        // u32 [batch][F + residual_ring], as in DecodeParams; null where no scheme has a window.
    const int* kv_lens;                        // i32 [batch]: cached tokens.
    const int* row_starts;                     // i32 [batch + 1]: the first row of each sequence's range, and the end of the last one.
    const int* first_tokens;                   // i32 [batch]: the first token of each range, or null for 0.
    const float* k_tensor_scales;              // f32 [num_kv_heads], or null.
    const float* v_tensor_scales;              // f32 [num_kv_heads], or null.
    long long k_token_stride;                  // Elements from one token of K to the next.
    long long v_token_stride;                  // Elements from one token of V to the next.
    long long page_stride;                     // Bytes from one page to the next.
    int page_table_stride;                     // Entries of the page table per sequence.
    int dtype;                                 // Number format of K and V: Dtype.
    unsigned int residual_ring;                // Slots of a sequence that the residual pages of its last home pages share, a power of two; 0 where no scheme has a window.
    unsigned int reserved;                     // Unused: the size is a multiple of 8.
};
static_assert(sizeof(ExportParams) == 120, "params.rs");

// Parameters of `dequantize.cu`, of `dequantize_rows.cu` and of `gather_pages.cu`.
struct DequantizeParams {
    DecodeParams step;                         // Those of a step that would attend the cache as it is.
    unsigned char* pages;                      // Pages of 64 tokens to write.
    unsigned int* table;                       // Their table to write, u32 [batch][pages_each].
    float* scales;                             // What the numbers of each KV head count, to write: f32 [2][num_kv_heads], of K and of V. Not where bytes are copied.
    unsigned int* residual_table;              // Where bytes are copied, and read with residuals: the table of the pages with these to write, u32 [batch][1 + residual_ring].
    unsigned int pages_each;                   // Pages to write per sequence.
    unsigned int fine_pages;                   // From a tile's page to that with residuals.
    int num_blocks;                            // Entries of the step's query_blocks.
    unsigned int residual_ring;                // Entries of `residual_table` per sequence, but for the first: a power of two.
};
static_assert(sizeof(DequantizeParams) == 480, "params.rs");

// Parameters of `copy_pages.cu`.
struct CopyPagesParams {
    const unsigned char* from;                 // Pages to read.
    unsigned char* to;                         // Pages to write.
    const long long* pairs;                    // i64 [pair][2]: the page to read and the page to write.
    long long from_stride;                     // Bytes from one page to the next where pages are read.
    long long to_stride;                       // Bytes from one page to the next where pages are written.
    long long from_pages;                      // Pages that may be read.
    long long to_pages;                        // Pages that may be written.
    unsigned long long page_bytes;             // Bytes of a page, a multiple of 16.
};
static_assert(sizeof(CopyPagesParams) == 64, "params.rs");

// Parameters of `merge_states.cu`.
struct MergeStatesParams {
    const void* outs;                          // Outputs [state][row][head_dim].
    const float* lses;                         // f32 [state][row].
    void* out;                                 // Merged outputs [row][head_dim].
    float* lse;                                // f32 [row], or null.
    long long out_stride;                      // Elements from one state's outputs to the next one's.
    long long lse_stride;                      // Elements from one state's log-sum-exps to the next one's.
    int states;                                // States.
    int rows;                                  // Rows.
    int head_dim;                              // Elements of a row, a multiple of 4 up to 576.
    int in_dtype;                              // Number format of the states' outputs: Dtype.
    int out_dtype;                             // Number format of the merged outputs: Dtype.
    unsigned int reserved;                     // Unused: the size is a multiple of 8.
};
static_assert(sizeof(MergeStatesParams) == 72, "params.rs");

// Parameters of `merge_spans.cu`.
struct MergeSpansParams {
    const float2* max_sums;                    // Maximum and sum of each row's states [state][rows_apart], in the order of their tokens; a maximum of -inf where the row sees no token.
    const float* o;                            // O of the states [state][rows_apart][head_dim].
    void* out;                                 // Outputs [row][head_dim].
    float* lse;                                // f32 [row], or null.
    const float* sinks;                        // f32 [num_q_heads], or null.
    const float* v_tensor_scales;              // f32 [num_kv_heads], or null.
    unsigned long long rows_apart;             // Rows from one state to the next.
    int states;                                // States of a row: spans of all shards.
    int rows;                                  // Rows [query token][num_q_heads].
    int num_q_heads;                           // Query heads.
    int heads_per_kv;                          // Query heads per KV head.
    int dtype;                                 // Number format of out: Dtype.
    unsigned int reserved;                     // Unused: the size is a multiple of 8.
};
static_assert(sizeof(MergeSpansParams) == 80, "params.rs");

// Parameters of `check.cu`, beside those of the launch that it checks.
struct CheckParams {
    int* report;                               // i32 [4], zeroed: {kind, index, value, limit}.
    const long long* slots;                    // Slots of an append, as in AppendParams, or null.
    const long long* positions;                // Positions of the tokens to append, as in AppendParams, or null.
    const unsigned int* centre_rows;           // Rows of the tokens' centres, as in AppendParams, or null.
    const int* centre_positions;               // The tokens' numbers in their sequences, as in AppendParams, beside rows of centres.
    const int* cu_seqlens_q;                   // First query tokens, as in QueryBlocksParams, or null.
    long long num_positions;                   // Positions that are allowed; 0 where none matters.
    int max_kv_len;                            // The longest length that is allowed.
    unsigned int num_pages;                    // Pages in the pool.
    int page_size;                             // Tokens per page; 0 without pages.
    int head_dim;                              // Elements per head.
    int min_kv_len;                            // The shortest length that is allowed: the new tokens of an append.
    int query_tokens;                          // Query tokens of all sequences; of an append by slots, its tokens.
    int num_blocks;                            // Entries of a list of query blocks that the device has made, which says how many query tokens there are; 0 without one.
    unsigned int num_centre_rows;              // Rows of centres.
};
static_assert(sizeof(CheckParams) == 88, "params.rs");

// Parameters of `grid_functions.cu`.
struct GridFunctionsParams {
    float* points;                             // f32 [num_points]: 2^(first_point/64), 2^((first_point + 1)/64), …
    float* scales;                             // f32 [num_scales]: the f16 numbers from +0 on as scales of V, on the grid.
    int first_point;                           // The first point.
    int num_points;                            // How many.
    int num_scales;                            // How many scales.
    unsigned int reserved;                     // Unused: the size is a multiple of 8.
};
static_assert(sizeof(GridFunctionsParams) == 32, "params.rs");

// Parameters of `read.cu`.
struct ReadParams {
    const unsigned char* from;                 // Buffer to read.
    unsigned long long bytes;                  // Bytes to read, a multiple of 16.
    unsigned int* sink;                        // One word, written if the bytes cancel out.
};
static_assert(sizeof(ReadParams) == 24, "params.rs");

}  // namespace attn
