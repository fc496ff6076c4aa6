/* attn: attention over a quantized KV cache.

   Written by cargo xtask header from crates/attn-c/src; docs/c.md is the guide.

   Every function that can fail returns an attn_status; attn_last_error() then has the sentence. A refused call changes nothing.
   Pointers that are documented as optional may be NULL. Handles may move between threads; calls on one cache wait for each other. */

#ifndef ATTN_H
#define ATTN_H

#include <stddef.h>
#include <stdint.h>

// Version of this interface's types and functions. A program and the library that it runs with have the same.
#define ATTN_ABI_VERSION 6

// attn_cache_stats.saturated of a cache whose numbers are not counted: rows in device memory were appended to it.
#define ATTN_NOT_COUNTED UINT64_MAX

// A flag of attn_modifiers: query tokens see all cached tokens, also those behind them.
#define ATTN_NOT_CAUSAL 1

// A flag of attn_modifiers: steps of an integer format in which some sequence has more than 16 query tokens may be computed by floats, which is faster on
// a GPU with tensor cores. The answer is as near to attention over the same cache, but no bits are promised.
#define ATTN_FAST 2

// What a call came to. After any but ATTN_STATUS_OK, the cache and the outputs are unchanged, unless the status is ATTN_STATUS_DEVICE or
// ATTN_STATUS_INTERNAL.
typedef enum attn_status {
  // Done; of calls that take a stream: enqueued.
  ATTN_STATUS_OK = 0,
  // An argument that the library does not define, such as a format's name, or NULL.
  ATTN_STATUS_PARAMETER = 1,
  // Arguments that do not fit each other or the cache.
  ATTN_STATUS_SHAPE = 2,
  // NaN, infinity, or a number beyond what the format or the arithmetic takes.
  ATTN_STATUS_NUMBER = 3,
  // The pool has too few free pages. Free a sequence, or create a larger pool.
  ATTN_STATUS_CACHE_FULL = 4,
  // A sequence that the cache does not have.
  ATTN_STATUS_SEQUENCE = 5,
  // There is no memory for it.
  ATTN_STATUS_OUT_OF_MEMORY = 6,
  // The device is absent, or has no kernel for the problem.
  ATTN_STATUS_UNSUPPORTED = 7,
  // The device failed, or the handle is of another device.
  ATTN_STATUS_DEVICE = 8,
  // A defect of the library. The handles of the call are unusable but for their destruction.
  ATTN_STATUS_INTERNAL = 9,
} attn_status;

// Type of the numbers in a caller's memory.
typedef enum attn_dtype {
  // float.
  ATTN_DTYPE_F32 = 0,
  // 16-bit IEEE numbers.
  ATTN_DTYPE_F16 = 1,
  // The upper halves of float.
  ATTN_DTYPE_BF16 = 2,
} attn_dtype;

// A paged, quantized cache of K and V of one layer, or of several that have lengths and pages in common.
typedef struct attn_cache attn_cache;

// An opened device. Caches and plans keep what they need of it, so it can be closed before them.
typedef struct attn_device attn_device;

// What reads and writes the caller's pages. It keeps no sequences, lengths or pages, and calls may run side by side.
typedef struct attn_host_pages attn_host_pages;

// Launches for one batch shape. They allocate nothing and wait for nothing.
typedef struct attn_plan attn_plan;

// Launches that move pages and results of some caches. They allocate nothing and wait for nothing.
typedef struct attn_transfer attn_transfer;

// Tokens for a sequence.
typedef struct attn_append {
  // The sequence's index.
  size_t sequence;
  // How many tokens it gets.
  size_t tokens;
} attn_append;

// Rotary positions (RoPE) of an append by a plan, computed in 32 bits: K is stored as if its 32-bit rows had been rotated first. All addresses are of
// device memory, aligned to 16 bytes.
typedef struct attn_rotary {
  // sizeof(attn_rotary).
  size_t struct_size;
  // [num_positions][rotary_dim]: of a position, the cosines of its pairs, then their sines.
  const void *cos_sin;
  // An attn_dtype, of cos_sin.
  uint32_t cos_sin_dtype;
  // Rows of cos_sin.
  size_t num_positions;
  // Elements of a head that are rotated, from its first on: a multiple of 4; 0: head_dim.
  size_t rotary_dim;
  // 0: element i and i + rotary_dim / 2 are a pair (Hugging Face's Llama, is_neox_style); else 2·i and 2·i + 1.
  uint32_t interleaved;
  // int64 [count]: each token's row of cos_sin. Tokens without a slot may have none; their queries stay as they are then. For attn_plan_step also NULL:
  // the tokens' numbers in their sequences, from 0.
  const int64_t *positions;
  // The tokens' queries [count][q_heads][head_dim], in the dtype of K; NULL: K alone is rotated.
  const void *q;
  // Where rotated queries go; NULL: into q.
  void *q_out;
  // Elements from one token of q to the next, a multiple of 4; 0: q_heads·head_dim.
  size_t q_token_stride;
  // Elements from one token of q_out to the next, a multiple of 4; 0: q_heads·head_dim. In place it is q_token_stride.
  size_t q_out_token_stride;
} attn_rotary;

// New tokens, [tokens][kv_heads][head_dim], of V [tokens][kv_heads][v_dim]: those of the first sequence, then those of the next. A head's elements are contiguous; what lies
// between rows is not read.
typedef struct attn_tokens {
  // sizeof(attn_tokens).
  size_t struct_size;
  // K, after RoPE; before it with rotary.
  const void *k;
  // V; NULL for a format of latents, whose V is in K.
  const void *v;
  // An attn_dtype, of K and V.
  uint32_t dtype;
  // Elements from one token of K to the next; 0: kv_heads times the next head's.
  size_t k_token_stride;
  // Elements from one token of V to the next; 0: kv_heads times the next head's.
  size_t v_token_stride;
  // Elements from one head of K to the next; 0: head_dim. Device memory has no other.
  size_t k_head_stride;
  // Elements from one head of V to the next; 0: v_dim. Device memory has no other.
  size_t v_head_stride;
  // RoPE of K, and of queries beside it, for attn_plan_append_slots; else NULL.
  const struct attn_rotary *rotary;
} attn_tokens;

// The description of a cache. Fields that are 0 have their defaults.
typedef struct attn_cache_config {
  // sizeof(attn_cache_config).
  size_t struct_size;
  // How K and V are stored: "int8", "int4", "int8/int4", "fp8", "bf16", "f16" and others of docs/c.md.
  const char *format;
  // KV heads.
  size_t kv_heads;
  // Elements of a head's key and query: 64, 80, 96, 128, 160, 192, 256, 320, 512 or 576.
  size_t head_dim;
  // Elements of a value and of an output, where they are not head_dim; 0: head_dim.
  size_t v_dim;
  // Sequences, all empty at first; 0: 1.
  size_t sequences;
  // Tokens that each sequence has room for.
  size_t max_tokens;
  // Pages of the pool; 0: enough for max_tokens of every sequence.
  size_t pages;
  // Tokens per page: 16, 32, 64 or 128; 0: 64.
  size_t page_size;
  // Formats that keep the newest tokens finer, such as int4: the most query tokens that a step has of one sequence; 0: 64.
  size_t max_q_len;
  // fp8 and int8-tensor: a static scale for each KV head of the first layer, then of the next; NULL for other formats.
  const float *k_scales;
  // As k_scales, for V.
  const float *v_scales;
  // Layers of a model that have this shape, with lengths and pages in common and a pool for each: attn_cache_reserve; 0: 1.
  size_t layers;
  // Query heads of the steps to come, so that a number that no step can have is refused here; 0: not known yet.
  size_t q_heads;
  // Whether each sequence's keys are stored without what they have in common; 0: for int8, int8/int4 and int4; 1: yes, refused for other formats; 2: no.
  size_t centres;
  // Formats that keep the newest tokens finer, such as int4: tokens after which, again and again, a sequence keeps what attn_cache_truncate needs to leave it so long, a
  // multiple of 64 and of page_size; attn_cache_stats.checkpoint_bytes says what that takes. 0: none. Other formats are truncated to any length.
  size_t checkpoints;
} attn_cache_config;

// The state of a cache's pool, and what has become of the numbers in it.
typedef struct attn_cache_stats {
  // Bytes of a page, in each layer's pool.
  size_t page_bytes;
  // Pages of each layer's pool.
  size_t pages;
  // Pages that no sequence has.
  size_t free_pages;
  // fp8, int8-tensor and f16: numbers that were appended so far and stored as the end of the format's range, being larger than static scales
  // (f16: than 65504) allow; ATTN_NOT_COUNTED where that is not known. 0 for other formats.
  uint64_t saturated;
  // How uneven the channels of the keys are: their mean square over that of the middle channel, in the worst head that the cache has looked at. Models
  // without biases of K have 1 to 4; at more than 10, 4 and 8 bits store the keys badly. 0 before a sequence has 128 tokens.
  double key_outliers;
  // Bytes that a sequence takes in all layers for each of its checkpoints (attn_cache_config.checkpoints); 0 without.
  size_t checkpoint_bytes;
} attn_cache_stats;

// What pages in host memory hold.
typedef struct attn_host_pages_config {
  // sizeof(attn_host_pages_config).
  size_t struct_size;
  // A format without a window and without static scales, such as "int8", "int8/int4-w0", "int4-g1" and "bf16".
  const char *format;
  // KV heads.
  size_t kv_heads;
  // Elements of a head's key and query.
  size_t head_dim;
  // Elements of a value and of an output, where they are not head_dim; 0: head_dim.
  size_t v_dim;
  // Tokens per page: 16, 32, 64 or 128; 0: 64.
  size_t page_size;
} attn_host_pages_config;

// What changes scores. All zero: causal, with the factor 1/sqrt(head_dim), and nothing else.
typedef struct attn_modifiers {
  // Factor of q·k; 0: 1/sqrt(head_dim).
  float scale;
  // Soft cap: scaled scores become softcap·tanh(score/softcap); 0: none.
  float softcap;
  // Tokens that a query token sees at most, its own included; 0: all.
  size_t window;
  // Tokens of a chunk, of which a query token sees its own alone; 0: none.
  size_t chunk;
  // ALiBi: a slope for each query head, or NULL.
  const float *alibi_slopes;
  // Attention sinks: a logit for each query head that takes part in the softmax and has no value, or NULL.
  const float *sinks;
  // ATTN_NOT_CAUSAL and ATTN_FAST, or 0.
  uint32_t flags;
} attn_modifiers;

// The sequences of a step over the caller's pages. The last query token of a sequence stands at its last token: append first.
typedef struct attn_host_step {
  // sizeof(attn_host_step).
  size_t struct_size;
  // Query heads: a multiple of the KV heads.
  size_t q_heads;
  // Whole pages of attn_host_pages_page_bytes each, side by side.
  const uint8_t *pool;
  // Bytes of the pool.
  size_t pool_bytes;
  // Number of sequences.
  size_t count;
  // [count][page_table_stride]: a sequence's pages in order. Entries behind its last token are not looked at.
  const int32_t *page_table;
  // Entries of a sequence in page_table.
  size_t page_table_stride;
  // Tokens of each sequence, those of the step included.
  const int32_t *kv_lens;
  // Query tokens of each; NULL: one.
  const size_t *q_lens;
  // What changes scores, but for ATTN_FAST.
  struct attn_modifiers modifiers;
} attn_host_step;

// Queries, [query tokens][q_heads][head_dim], and outputs, [query tokens][q_heads][v_dim]: those of the step's first sequence, then those of the next. A head's elements are
// contiguous; what lies between rows is neither read nor written, and nothing else writes it while the call runs.
typedef struct attn_rows {
  // sizeof(attn_rows).
  size_t struct_size;
  // The queries, after RoPE.
  const void *q;
  // The outputs.
  void *out;
  // An attn_dtype, of queries and outputs. 16-bit outputs are the 32-bit ones, rounded to nearest even.
  uint32_t dtype;
  // Log-sum-exps [query tokens][q_heads], or NULL.
  float *lse;
  // Elements from one query token to the next; 0: q_heads times the next head's. Device memory has no other, here and below.
  size_t q_token_stride;
  // Elements from one head of a query to the next; 0: head_dim.
  size_t q_head_stride;
  // Elements from one token of the outputs to the next; 0: q_heads times the next head's.
  size_t out_token_stride;
  // Elements from one head of the outputs to the next; 0: v_dim.
  size_t out_head_stride;
} attn_rows;

// Another engine's cache: pages of rows of bf16, f16, fp8 (e4m3) or int8, such as [pages][tokens][kv_heads][head_dim] and
// [pages][kv_heads][tokens][head_dim]. All addresses are of device memory. A row's elements are side by side; rows begin at multiples of 16 bytes.
typedef struct attn_paged_rows {
  // sizeof(attn_paged_rows).
  size_t struct_size;
  // The rows of K.
  const void *k;
  // The rows of V.
  const void *v;
  // Pages of K and of V.
  size_t num_pages;
  // Elements from one page of K to the next.
  size_t k_page_stride;
  // Elements from one token of a page of K to the next.
  size_t k_token_stride;
  // Elements from one head of a token of K to the next.
  size_t k_head_stride;
  // Elements from one page of V to the next.
  size_t v_page_stride;
  // Elements from one token of a page of V to the next.
  size_t v_token_stride;
  // Elements from one head of a token of V to the next.
  size_t v_head_stride;
  // int32 [count][page_table_stride]: a sequence's pages in order, of attn_plan_config.page_size tokens each.
  const int32_t *page_table;
  // Entries of a sequence in page_table: at least max_tokens / page_size, rounded up.
  size_t page_table_stride;
  // int32 [count]: the tokens of each sequence.
  const int32_t *kv_lens;
  // float [kv_heads] for fp8 and int8-tensor; else NULL.
  const float *k_scales;
  // As k_scales, for V.
  const float *v_scales;
} attn_paged_rows;

// A plan's own memory on the device, which the caller allocates and fills.
typedef struct attn_buffers {
  // sizeof(attn_buffers).
  size_t struct_size;
  // attn_plan_info.workspace_bytes bytes, aligned to 256, of which the first zeroed_bytes are zero. Launches that share it do not overlap.
  void *workspace;
  // attn_plan_info.scratch_bytes bytes, aligned to 256, that launches of any plans may share, one after another; of the workspace only the first
  // zeroed_bytes are used then. NULL: they are the workspace's.
  void *scratch;
  // What attn_plan_query_blocks gives, in device memory, or what attn_plan_list_query_blocks has listed; NULL where that is nothing.
  const void *query_blocks;
  // What attn_plan_alibi_slopes gives, in device memory; NULL without.
  const float *alibi_slopes;
  // float [q_heads]: the sinks; NULL without.
  const float *sinks;
} attn_buffers;

// The shape of a batch, for every step of these heads and query tokens with lengths up to the longest.
typedef struct attn_plan_config {
  // sizeof(attn_plan_config).
  size_t struct_size;
  // How K and V are stored, as in attn_cache_config.
  const char *format;
  // Query heads.
  size_t q_heads;
  // KV heads.
  size_t kv_heads;
  // Elements of a head's key and query, as in attn_cache_config.
  size_t head_dim;
  // Elements of a value and of an output, where they are not head_dim; 0: head_dim.
  size_t v_dim;
  // Tokens per page; 0: 64.
  size_t page_size;
  // Sequences.
  size_t count;
  // Query tokens of each; NULL: one.
  const size_t *q_lens;
  // The longest length of a sequence.
  size_t max_tokens;
  // What changes scores. A launch reads slopes and sinks from attn_buffers.
  struct attn_modifiers modifiers;
  // Not 0: attn_plan_append_slots and attn_plan_step take attn_tokens.rotary, whose kernel is loaded, too.
  uint32_t rotary;
  // Not 0: sequences bring other numbers of query tokens from step to step, as attn_plan_list_query_blocks says; q_lens gives how many tokens they
  // have in all, and the most that one mostly has, for which the kernel is chosen.
  uint32_t ragged;
  // Not 0: pages are another engine's, of rows, which attn_plan_attend_rows reads as they lie; the plan appends nothing. The format is bf16, f16, fp8
  // or int8-tensor.
  uint32_t rows;
  // Not 0: sequences are shards, runs of whole spans of 1024 tokens but for the last shard, for attn_plan_attend_spans; neither ragged nor rows. Sinks
  // belong to attn_transfer_merge_spans.
  uint32_t spans;
} attn_plan_config;

// What a plan's launches need.
typedef struct attn_plan_info {
  // Bytes of a page of the pool; 0 where pages are another engine's.
  size_t page_bytes;
  // Bytes of the workspace.
  size_t workspace_bytes;
  // Bytes at the workspace's start that are zeroed before the first launch.
  size_t zeroed_bytes;
  // Bytes of the workspace that launches leave nothing in, which plans may share (attn_buffers.scratch).
  size_t scratch_bytes;
  // Bytes of the query blocks; 0: there are none.
  size_t query_block_bytes;
  // Entries of a sequence in attn_pages.residual_pages, of a ragged plan for one that brings all tokens; 0 for formats without.
  size_t residual_slots;
  // Of these, the entries in front: a sequence keeps the residual pages of so many first pages for good. 0 for formats without.
  size_t first_residual_pages;
  // States that attn_plan_attend_spans leaves of each row: those of the spans of max_tokens. 0 for other plans.
  size_t spans;
} attn_plan_info;

// Where the sequences' tokens lie. All addresses are of device memory, aligned to 16 bytes.
typedef struct attn_pages {
  // sizeof(attn_pages).
  size_t struct_size;
  // The pool: num_pages pages, aligned to 16 bytes.
  void *pool;
  // Pages of the pool.
  size_t num_pages;
  // int32 [count][page_table_stride]: a sequence's pages in order.
  const int32_t *page_table;
  // Entries of a sequence in page_table: at least max_tokens / page_size, rounded up.
  size_t page_table_stride;
  // int32 [count][residual_slots] for formats that keep some tokens finer: the residual page of a sequence's page i at i below first =
  // first_residual_pages, else at first + i % (residual_slots - first). Else NULL.
  const int32_t *residual_pages;
  // int32 [count]: the tokens of each sequence, new ones included.
  const int32_t *kv_lens;
  // float [kv_heads] for fp8 and int8-tensor; else NULL.
  const float *k_scales;
  // As k_scales, for V.
  const float *v_scales;
  // Bytes from one page of the pool to the next, a multiple of 16; 0: attn_plan_info.page_bytes. More where pages are padded, or those of other
  // layers lie between.
  size_t page_stride;
} attn_pages;

// Where attn_plan_attend_spans leaves the states of a shard's spans. Addresses are of device memory, aligned to 16 bytes; rows are query tokens times
// query heads, sequence after sequence.
typedef struct attn_spans {
  // sizeof(attn_spans).
  size_t struct_size;
  // int32 [count]: tokens that lie in shards ahead of those of attn_pages.kv_lens, multiples of 1024. NULL: the shard is each sequence's first.
  const int32_t *tokens_before;
  // int32 [count]: tokens that follow those of attn_pages.kv_lens in other shards; query tokens are the last of all. NULL: none follow.
  const int32_t *tokens_after;
  // float [spans][rows][2]: maximum, -inf where a row sees no token of a span, and sum.
  float *max_sums;
  // float [spans][rows][v_dim]; not written where a row sees no token.
  float *o;
} attn_spans;

// Which sequences attend, with how many query tokens. The last query token of a sequence stands at its last cached token: append first.
typedef struct attn_step {
  // sizeof(attn_step).
  size_t struct_size;
  // Query heads: a multiple of the cache's KV heads.
  size_t q_heads;
  // Number of sequences.
  size_t count;
  // Their indices in the cache, in any order.
  const size_t *sequences;
  // Query tokens of each; NULL: one.
  const size_t *q_lens;
  // What changes scores.
  struct attn_modifiers modifiers;
  // The layer that is attended, in a cache of several; else 0.
  size_t layer;
  // Block-sparse attention: the pages that each KV head attends, ascending numbers of pages in the sequence: those of the first sequence's first KV head, then those
  // of its next one, and so on; NULL with page_counts NULL: all. For one query token of each sequence, without score modifiers that go by a token's place or by the
  // head, and static scales that are the same for all KV heads. In a cache with centres, and in formats with a window, the pages of a sequence's first 64 tokens are among them, and in the
  // latter its newest pages, those of the window.
  const uint32_t *pages;
  // How many each KV head of each sequence has, count times the cache's KV heads; NULL: all pages are attended.
  const size_t *page_counts;
} attn_step;

// The caches whose pages and results are moved. Fields that are 0 have their defaults.
typedef struct attn_transfer_config {
  // sizeof(attn_transfer_config).
  size_t struct_size;
  // How K and V are stored, as in attn_cache_config.
  const char *format;
  // KV heads.
  size_t kv_heads;
  // Elements of a head's key, as in attn_cache_config.
  size_t head_dim;
  // Elements of a value and of an output, where they are not head_dim; 0: head_dim.
  size_t v_dim;
  // Tokens per page; 0: 64.
  size_t page_size;
  // Formats that keep some tokens finer: the most query tokens of a step, as for the plan whose pages these are; 0: 1.
  size_t max_q_len;
} attn_transfer_config;

// Ranges of tokens, one of each sequence of attn_pages, and where their rows go. All addresses are of device memory, aligned to 16 bytes.
typedef struct attn_ranges {
  // sizeof(attn_ranges).
  size_t struct_size;
  // Rows of K [token][kv_heads][head_dim], those of the first range, then those of the next; NULL: V alone.
  void *k;
  // Rows of V, as those of K; NULL: K alone.
  void *v;
  // An attn_dtype, of k and v.
  uint32_t dtype;
  // Elements from one token of K to the next, a multiple of 8; 0: kv_heads·head_dim.
  size_t k_token_stride;
  // Elements from one token of V to the next, a multiple of 8; 0: kv_heads·v_dim.
  size_t v_token_stride;
  // int32 [count + 1]: the first row of each range, then the end of the last.
  const int32_t *row_starts;
  // int32 [count]: the first token of each range; NULL: the sequences' first ones.
  const int32_t *first_tokens;
  // Sequences.
  size_t count;
  // No range has more tokens.
  size_t max_tokens;
} attn_ranges;

// States of spans of all shards, in the order of their tokens, such as an all-gather of what attn_plan_attend_spans leaves. All addresses are of device
// memory, aligned to 16 bytes.
typedef struct attn_span_merge {
  // sizeof(attn_span_merge).
  size_t struct_size;
  // float [states][rows][2].
  const float *max_sums;
  // float [states][rows][v_dim].
  const float *o;
  // Spans of all shards together.
  size_t states;
  // Rows: query tokens times query heads.
  size_t rows;
  // Query heads.
  size_t q_heads;
  // Outputs [rows][v_dim].
  void *out;
  // An attn_dtype, of out.
  uint32_t dtype;
  // float [rows]: log-sum-exps; NULL: none.
  float *lse;
  // float [q_heads]: sinks; NULL: none.
  const float *sinks;
  // float [kv_heads] for fp8 and int8-tensor; else NULL.
  const float *v_scales;
} attn_span_merge;

// Copies of pages: inside a pool, between pools, or to and from pinned host memory that the device can address (cudaHostAlloc).
typedef struct attn_page_copies {
  // sizeof(attn_page_copies).
  size_t struct_size;
  // The pages that are read.
  const void *from;
  // Their number.
  size_t from_pages;
  // Bytes from one of them to the next, a multiple of 16; 0: they lie side by side.
  size_t from_stride;
  // The pages that are written.
  void *to;
  // Their number.
  size_t to_pages;
  // Bytes from one of them to the next; 0: they lie side by side.
  size_t to_stride;
  // int64 [count][2] in device memory: a page that is read, and the one that gets its bytes; a negative number skips the pair.
  const int64_t *pairs;
  // Pairs.
  size_t count;
} attn_page_copies;

// Results of the same query rows over disjoint tokens, in their order. All addresses are of device memory, aligned to 16 bytes.
typedef struct attn_merge {
  // sizeof(attn_merge).
  size_t struct_size;
  // Outputs [states][rows][v_dim].
  const void *outs;
  // float [states][rows]: log-sum-exps, -inf where a state saw no token of a row.
  const float *lses;
  // An attn_dtype, of outs.
  uint32_t dtype;
  // Elements from one state's outputs to the next one's, a multiple of 4; 0: rows·v_dim.
  size_t out_stride;
  // Elements from one state's log-sum-exps to the next one's; 0: rows.
  size_t lse_stride;
  // Merged outputs [rows][v_dim]; may be those of the first state.
  void *out;
  // An attn_dtype, of out.
  uint32_t out_dtype;
  // float [rows]: merged log-sum-exps; NULL: none.
  float *lse;
  // Results to merge.
  size_t states;
  // Rows of each: query tokens times query heads.
  size_t rows;
} attn_merge;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's ATTN_ABI_VERSION, to be compared with the header's at the start of a program.
uint32_t attn_abi_version(void);

// The library's version, such as "0.1.0".
const char *attn_version(void);

// Appends tokens in host memory to several sequences at once, or to none. For a cache of one layer; of others see attn_cache_reserve.
//
// Needs: cache has not been destroyed; appends has count entries, each of another sequence; tokens has as many tokens as they add up to.
enum attn_status attn_cache_append(struct attn_cache *cache,
                                   const struct attn_append *appends,
                                   size_t count,
                                   const struct attn_tokens *tokens);

// Appends tokens in the GPU's memory: enqueues the writes on stream, a CUstream or cudaStream_t of the device's primary context (NULL: the default
// stream), and counts the tokens. The bytes are those of attn_cache_append.
//
// Needs: Everything that attn_cache_append needs, with rows in device memory, aligned to 16 bytes, which stays as it is until the work has run. K and V are finite.
enum attn_status attn_cache_append_on(struct attn_cache *cache,
                                      const struct attn_append *appends,
                                      size_t count,
                                      const struct attn_tokens *tokens,
                                      void *stream);

// Begins a step of a model whose layers share the cache: takes the pages of new tokens in all layers, and counts the tokens. attn_cache_write then
// writes them layer by layer, and a layer that is written can be attended; the last one's write ends the step. Until then these sequences are neither
// forked, truncated, emptied, dropped from nor saved, and attn_cache_cancel_step takes the whole step back.
//
// Needs: cache has not been destroyed; appends has count entries, each of another sequence.
enum attn_status attn_cache_reserve(struct attn_cache *cache,
                                    const struct attn_append *appends,
                                    size_t count);

// Writes one layer's K and V of the tokens that attn_cache_reserve has counted, in host memory. Layers come in any order, each once. A write that was
// refused or failed is repeated, or the step is cancelled.
//
// Needs: cache has not been destroyed; tokens has as many tokens as the appends of attn_cache_reserve add up to, in their order.
enum attn_status attn_cache_write(struct attn_cache *cache,
                                  size_t layer,
                                  const struct attn_tokens *tokens);

// Writes one layer's tokens from the GPU's memory: enqueues the writes on stream, as attn_cache_append_on. The bytes are those of attn_cache_write.
//
// Needs: Everything that attn_cache_write needs, with rows in device memory, aligned to 16 bytes, which stays as it is until the work has run. K and V are finite.
enum attn_status attn_cache_write_on(struct attn_cache *cache,
                                     size_t layer,
                                     const struct attn_tokens *tokens,
                                     void *stream);

// Takes the open step back, whichever layers were written: lengths and pages are those before attn_cache_reserve. Does nothing without an open step.
//
// Needs: cache has not been destroyed.
enum attn_status attn_cache_cancel_step(struct attn_cache *cache);

// Creates an empty cache in a device's memory.
//
// Needs: device is open; config and what it points to are readable; cache is writable.
enum attn_status attn_cache_create(const struct attn_device *device,
                                   const struct attn_cache_config *config,
                                   struct attn_cache **cache);

// Destroys a cache, when its steps on the device have run; NULL is none.
//
// Needs: cache is NULL or was created and has not been destroyed; no call on it is under way.
void attn_cache_destroy(struct attn_cache *cache);

// Makes the empty sequence to share the tokens of from. Their pages are copied when one of the two changes them.
//
// Needs: cache has not been destroyed.
enum attn_status attn_cache_fork(struct attn_cache *cache, size_t from, size_t to);

// Takes tokens from a sequence's end, such as those of a rejected draft, so that tokens are left. Formats that keep the newest tokens finer, such as int4, go back by the
// tokens of the last append, to the first 64 or fewer, and to checkpoints (attn_cache_config.checkpoints); attn_cache_longest_prefix says how far from the length that is asked for.
//
// Needs: cache has not been destroyed.
enum attn_status attn_cache_truncate(struct attn_cache *cache,
                                     size_t sequence,
                                     size_t tokens);

// The most tokens, tokens at most, that attn_cache_truncate can leave of a sequence: where to go on from to have its first tokens again. To keep the sequence, fork it and
// truncate the fork.
//
// Needs: cache has not been destroyed; longest is writable.
enum attn_status attn_cache_longest_prefix(const struct attn_cache *cache,
                                           size_t sequence,
                                           size_t tokens,
                                           size_t *longest);

// Frees the pages of a sequence's tokens before token, which no window sees any more; its length, its positions and its bits stay. After a step of
// a layer with a window, token is at most length - window + 1. Pages go by whole tiles of 64 tokens, in all layers. Queries that see a dropped token
// are refused, and so is attn_cache_save.
//
// Needs: cache has not been destroyed.
enum attn_status attn_cache_drop_before(struct attn_cache *cache,
                                        size_t sequence,
                                        size_t token);

// Drops the tokens of a sequence from first up to end and closes the gap, for streams that run for ever; as many as dropped, which may be NULL, then says. Whole
// pages and tiles of 64 tokens inside of the range go; the first 64 tokens stay, and of formats that keep the newest tokens finer, such as int4, these. Keys keep
// the rotary positions that they were appended with; windows and ALiBi count the tokens that are left.
//
// Needs: cache has not been destroyed; dropped is writable, or NULL.
enum attn_status attn_cache_drop_range(struct attn_cache *cache,
                                       size_t sequence,
                                       size_t first,
                                       size_t end,
                                       size_t *dropped);

// Empties a sequence.
//
// Needs: cache has not been destroyed.
enum attn_status attn_cache_free(struct attn_cache *cache, size_t sequence);

// The number of a sequence's tokens.
//
// Needs: cache has not been destroyed; tokens is writable.
enum attn_status attn_cache_tokens(const struct attn_cache *cache, size_t sequence, size_t *tokens);

// The state of a cache's pool.
//
// Needs: cache has not been destroyed; stats is writable.
enum attn_status attn_cache_get_stats(const struct attn_cache *cache, struct attn_cache_stats *stats);

// The number of pages that these appends take from the pool.
//
// Needs: cache has not been destroyed; appends has count entries; pages is writable.
enum attn_status attn_cache_pages_needed(const struct attn_cache *cache,
                                         const struct attn_append *appends,
                                         size_t count,
                                         size_t *pages);

// Writes a sequence as one block of bytes, with a header that says what it holds, to be kept elsewhere; attn_cache_restore brings it back, into this
// or another cache of the same format and shape, on any device. bytes NULL: only needed is written, the number of bytes.
//
// Needs: cache has not been destroyed; bytes is NULL or has size writable bytes; needed is writable.
enum attn_status attn_cache_save(const struct attn_cache *cache,
                                 size_t sequence,
                                 void *bytes,
                                 size_t size,
                                 size_t *needed);

// Fills an empty sequence from the bytes of attn_cache_save. Damaged ones, and those of another format, shape or other scales, are refused, and
// nothing changes.
//
// Needs: cache has not been destroyed; bytes has size readable bytes.
enum attn_status attn_cache_restore(struct attn_cache *cache,
                                    size_t sequence,
                                    const void *bytes,
                                    size_t size);

// Opens a device: "cpu", "cuda" or "cuda:0", "cuda:1" and so on, "wgpu" where the library was built with it. NULL: the one that the environment
// variable ATTN_BACKEND names, else the best one here.
//
// Needs: name is NULL or text that ends with a zero byte; device is writable.
enum attn_status attn_device_open(const char *name,
                                  struct attn_device **device);

// A device's name and what is used of it, for people; valid until it is closed. NULL for NULL.
//
// Needs: device is NULL or was opened and has not been closed.
const char *attn_device_name(const struct attn_device *device);

// Closes a device; NULL is none.
//
// Needs: device is NULL or was opened and has not been closed.
void attn_device_close(struct attn_device *device);

// Describes pages in host memory; of a pool, every page has attn_host_pages_page_bytes.
//
// Needs: config is as its type documents it; pages is writable.
enum attn_status attn_host_pages_create(const struct attn_host_pages_config *config, struct attn_host_pages **pages);

// Forgets the description; the caller's pages stay. NULL is none.
//
// Needs: pages is NULL or was created and has not been destroyed.
void attn_host_pages_destroy(struct attn_host_pages *pages);

// Bytes of a page: K, V and their scales, of all KV heads. 0 for NULL.
//
// Needs: pages is NULL or has not been destroyed.
size_t attn_host_pages_page_bytes(const struct attn_host_pages *pages);

// Appends tokens in host memory that bring their places, page · page_size + token of the page: any number, of any sequences. A negative slot skips its
// token, whatever it holds; of tokens with the same slot, the last one stays.
//
// Needs: pages has not been destroyed; pool has pool_bytes, which nothing else uses meanwhile; slots has count numbers; tokens has as many tokens.
enum attn_status attn_host_pages_append_slots(const struct attn_host_pages *pages,
                                              uint8_t *pool,
                                              size_t pool_bytes,
                                              const int64_t *slots,
                                              size_t count,
                                              const struct attn_tokens *tokens);

// Attends over the caller's pages, with rows in host memory. The bits are those of the same tokens in a cache.
//
// Needs: pages has not been destroyed; step and rows are as their types document them, with rows for all query tokens; nothing writes the pool meanwhile, and
// outputs overlap nothing else.
enum attn_status attn_host_pages_attend(const struct attn_host_pages *pages,
                                        const struct attn_host_step *step,
                                        const struct attn_rows *rows);

// Attends another engine's pages of rows: enqueues the step on stream, as attn_plan_attend. The plan was created with attn_plan_config.rows.
//
// Needs: Everything that attn_plan_attend needs; all rows of the pool's pages lie in the memory that kv describes, and those that kv_lens count are finite.
enum attn_status attn_plan_attend_rows(const struct attn_plan *plan,
                                       const struct attn_paged_rows *kv,
                                       const struct attn_rows *rows,
                                       const struct attn_buffers *buffers,
                                       void *stream);

// Prepares the launches for a batch shape on a GPU; the first plan of its kind may compile kernels.
//
// Needs: device is open; config and what it points to are readable; plan is writable.
enum attn_status attn_plan_create(const struct attn_device *device,
                                  const struct attn_plan_config *config,
                                  struct attn_plan **plan);

// Destroys a plan; launches that it enqueued go on. NULL is none.
//
// Needs: plan is NULL or was created and has not been destroyed.
void attn_plan_destroy(struct attn_plan *plan);

// What a plan's launches need.
//
// Needs: plan has not been destroyed; info is writable.
enum attn_status attn_plan_get_info(const struct attn_plan *plan, struct attn_plan_info *info);

// Loads the kernels of all plans that are no larger than this one: of at most as many sequences, query tokens and KV tokens, else of the same configuration. Those
// that the library has no image of are compiled side by side, which takes seconds: an engine that calls it at its start has no such step later.
//
// Needs: plan has not been destroyed; count is NULL or writable: how many kernels there are.
enum attn_status attn_plan_load_smaller(const struct attn_plan *plan,
                                        size_t *count);

// Copies a plan's query blocks to host memory of attn_plan_info.query_block_bytes bytes, for attn_buffers. Not for a ragged plan, whose list
// attn_plan_list_query_blocks makes: writes nothing.
//
// Needs: plan has not been destroyed; bytes has room for them.
enum attn_status attn_plan_query_blocks(const struct attn_plan *plan,
                                        void *bytes);

// Lists the query blocks of a step of a ragged plan on the device: enqueues one launch on stream, once for the layers of a step. A CUDA graph can
// capture it, and sequences may bring other numbers of query tokens each time that it runs. Sequences without any cost nothing.
//
// cu_seqlens_q is int32 [count + 1] on the device: the first query token of each sequence, then the end of the last one's, at most as many as
// attn_plan_config.q_lens has in all. query_blocks has room for attn_plan_info.query_block_bytes, for attn_buffers.
//
// Needs: Everything that attn_plan_attend needs; on the device, cu_seqlens_q never falls.
enum attn_status attn_plan_list_query_blocks(const struct attn_plan *plan,
                                             const int32_t *cu_seqlens_q,
                                             void *query_blocks,
                                             void *stream);

// Copies a plan's ALiBi slopes, as the kernels take them, to host memory of q_heads numbers, for attn_buffers. Without slopes, writes nothing.
//
// Needs: plan has not been destroyed; slopes has room for them.
enum attn_status attn_plan_alibi_slopes(const struct attn_plan *plan,
                                        float *slopes);

// Attends: enqueues the step on stream, a CUstream or cudaStream_t of the device's primary context, which is current. A CUDA graph can capture it,
// and reads lengths and pages anew each time that it runs.
//
// Needs: plan has not been destroyed. The structs' addresses are device memory as documented, and stay so until the work has run. On the device, lengths
// are 0 to max_tokens, and pages are below num_pages. ATTN_CUDA=check=1 in the environment checks them before each launch, outside of graphs.
enum attn_status attn_plan_attend(const struct attn_plan *plan,
                                  const struct attn_pages *pages,
                                  const struct attn_rows *rows,
                                  const struct attn_buffers *buffers,
                                  void *stream);

// Attends shards of the sequences, for a plan with attn_plan_config.spans: enqueues the step on stream, which leaves the states of the shards' spans.
// What all shards leave, one behind the other, attn_transfer_merge_spans makes into results: for integer formats the bits of one GPU over all tokens.
// Of rows only q and its dtype are read.
//
// Needs: Everything that attn_plan_attend needs; spans has room for attn_plan_info.spans states of each row. On the device, a shard with tokens_after is whole spans of 1024.
enum attn_status attn_plan_attend_spans(const struct attn_plan *plan,
                                        const struct attn_pages *pages,
                                        const struct attn_rows *rows,
                                        const struct attn_buffers *buffers,
                                        const struct attn_spans *spans,
                                        void *stream);

// Appends as many new tokens to each sequence, and attends: what attn_plan_append_slots and attn_plan_attend do, with the same bits, in less time.
// tokens has each tokens of the first sequence, then those of the next; their places are the last ones of pages->kv_lens. With tokens->rotary, K
// is rotated by its positions before it is stored, and rotary.q to where rows->q reads it, in the same launch; the plan was created with
// attn_plan_config.rotary then.
//
// Needs: Everything that attn_plan_attend needs; nothing else is enqueued between what wrote the pages before and this; every page that a new token touches belongs to its
// sequence alone.
enum attn_status attn_plan_step(const struct attn_plan *plan,
                                const struct attn_pages *pages,
                                const struct attn_tokens *tokens,
                                size_t each,
                                const struct attn_rows *rows,
                                const struct attn_buffers *buffers,
                                void *stream);

// Appends tokens that bring their places: enqueues the writes on stream. slots, int64 [count] in device memory: page·page_size + token of the
// page; tokens with a negative slot are skipped. residual_pages, int32 [count] in device memory for formats that keep some tokens finer:
// the residual page of the token's page, or -1 if that has none, as it is neither one of the first nor of the last pages of its sequence; else NULL. Of pages, the pool and the scales are read. With tokens->rotary, K is
// rotated by its positions before it is stored, and the queries of the same tokens beside it; the plan was created with attn_plan_config.rotary then.
//
// Needs: Everything that attn_plan_attend needs; on the device, slots are in the pool, no two are the same, and their pages belong to one sequence each;
// a sequence's tokens lie side by side, in order, with no token without a slot among them; K and V are finite, and
// the positions of tokens with slots are rows of cos_sin.
enum attn_status attn_plan_append_slots(const struct attn_plan *plan,
                                        const struct attn_pages *pages,
                                        const struct attn_tokens *tokens,
                                        const int64_t *slots,
                                        const int32_t *residual_pages,
                                        size_t count,
                                        void *stream);

// The name of an attn_status, such as "CACHE_FULL"; "UNKNOWN" for other numbers.
const char *attn_status_name(uint32_t status);

// The sentence of this thread's latest call that failed: what was given, what is allowed, and the next step. Empty if none has. Valid until this
// thread's next call that fails.
const char *attn_last_error(void);

// Attends, with rows in host memory.
//
// Needs: cache has not been destroyed; step and rows are as their types document them, with rows for all query tokens; outputs overlap nothing else.
enum attn_status attn_cache_attend(struct attn_cache *cache,
                                   const struct attn_step *step,
                                   const struct attn_rows *rows);

// Attends, with rows in the GPU's memory: enqueues the step on stream. For a step that a CUDA graph captures, see attn_plan.
//
// Needs: Everything that attn_cache_attend needs, with rows in device memory, aligned to 16 bytes, which stay until the work has run; queries are finite.
enum attn_status attn_cache_attend_on(struct attn_cache *cache,
                                      const struct attn_step *step,
                                      const struct attn_rows *rows,
                                      void *stream);

// Waits for a cache's steps on the device.
//
// Needs: cache has not been destroyed.
enum attn_status attn_cache_wait(struct attn_cache *cache);

// Loads the kernels for a GPU; the first handle of its kind may compile some.
//
// Needs: device is open; config and what it points to are readable; transfer is writable.
enum attn_status attn_transfer_create(const struct attn_device *device,
                                      const struct attn_transfer_config *config,
                                      struct attn_transfer **transfer);

// Destroys a handle; launches that it enqueued go on. NULL is none.
//
// Needs: transfer is NULL or was created and has not been destroyed.
void attn_transfer_destroy(struct attn_transfer *transfer);

// Writes ranges of cached tokens as rows of numbers, as they were before they were quantized, to the format's precision: enqueues the work on stream,
// as attn_plan_attend. pages->kv_lens are the cached tokens; they are read as a query of the last one would.
//
// Needs: Everything that attn_plan_attend needs for pages; ranges are cached, row_starts do not fall, and k and v have room for their rows and lie apart from all else.
enum attn_status attn_transfer_export(const struct attn_transfer *transfer,
                                      const struct attn_pages *pages,
                                      const struct attn_ranges *ranges,
                                      void *stream);

// Merges what shards left by attn_plan_attend_spans, in the order of their tokens, with each row's sink, and finishes: enqueues one launch on stream. For
// integer formats these are the bits of one GPU over all tokens. The handle has the format, kv_heads and head_dim of the plans.
//
// Needs: Everything that attn_plan_attend needs; merge->max_sums and o were left by launches of attn_plan_attend_spans, and out and lse overlap nothing else.
enum attn_status attn_transfer_merge_spans(const struct attn_transfer *transfer,
                                           const struct attn_span_merge *merge,
                                           void *stream);

// Copies pages as they are, with their scales: enqueues the work on stream, as attn_plan_attend.
//
// Needs: Addresses are as documented, and stay so until the work has run. On the device, pairs name pages of their pools; no page is written twice, or both
// read and written.
enum attn_status attn_transfer_pages(const struct attn_transfer *transfer,
                                     const struct attn_page_copies *copies,
                                     void *stream);

// Merges results over disjoint tokens into those over all: enqueues the work on stream, as attn_plan_attend. The same results in the same order give
// the same bits. A log-sum-exp counts its row's sink, so only one of the results may have been computed with sinks.
//
// Needs: Addresses are as documented, and stay so until the work has run. out and lse overlap no state but, in the same dtype, the first. Outputs are finite, and
// log-sum-exps finite or -inf.
enum attn_status attn_transfer_merge(const struct attn_transfer *transfer,
                                     const struct attn_merge *merge,
                                     void *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ATTN_H */
