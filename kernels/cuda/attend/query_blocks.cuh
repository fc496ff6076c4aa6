// What a launch's parameters say of query blocks: their tokens, the cached tokens that these see, and what is read with residuals.
#pragma once
#include "attend/config.cuh"
#include "common/divmod.cuh"
#include "common/params.h"

namespace attn {

// The query tokens that are attended together: those of a sequence, or some of them.
DEVICE QueryBlock query_block(const DecodeParams& p, int b) {
    if (p.query_blocks) return p.query_blocks[b];
    return {b, b * p.q_len, p.q_len, 0};
}
// Whether an entry of a list is a block: behind the blocks of a list that the device has made there may be others.
DEVICE bool has_tokens(const DecodeParams& p, int b) { return !p.query_blocks || p.query_blocks[b].tokens > 0; }
// Tokens of its sequence that follow the cached ones in other shards.
DEVICE int tokens_after(const DecodeParams& p, const QueryBlock& block) { return Config::LEAVES_SPANS && p.tokens_after ? p.tokens_after[block.sequence] : 0; }
// Tokens that some of them may see: where causal, up to the last one's position.
DEVICE int kv_len_of(const DecodeParams& p, const QueryBlock& block) {
    int kv_len = p.kv_lens[block.sequence];
    if (!p.causal) return kv_len;
    return Config::LEAVES_SPANS ? min(max(kv_len + tokens_after(p, block) - block.behind, 0), kv_len) : max(kv_len - block.behind, 0);
}
DEVICE int kv_len_of(const DecodeParams& p, int b) { return p.query_blocks ? kv_len_of(p, p.query_blocks[b]) : p.kv_lens[b]; }
// The position of the first of them, of which `kv_len` tokens are seen; of their sequence's last query token.
DEVICE int first_position(const DecodeParams& p, const QueryBlock& block, int kv_len) {
    if (Config::LEAVES_SPANS) return p.kv_lens[block.sequence] + tokens_after(p, block) - block.behind - block.tokens;
    return kv_len - (p.causal ? 0 : block.behind) - block.tokens;
}
DEVICE int last_position(const DecodeParams& p, const QueryBlock& block, int kv_len) { return kv_len + tokens_after(p, block) - 1; }

// Whether a sequence's first tile, which all rows read with residuals, is here and in no shard ahead.
DEVICE bool has_first_tile(const DecodeParams& p, int sequence) { return !Config::LEAVES_SPANS || !p.tokens_before || p.tokens_before[sequence] == 0; }
// Behind the first tile, the first one that some of these rows read with residuals: by the window of the first query token, which is the longest.
DEVICE int first_residual_tile_of(const DecodeParams& p, int tokens, int kv_len) {
    int window = Config::MAY_BE_DEQUANTIZED ? p.fine_window : WINDOW;
    return window == 0 ? 0x7fffffff : max(max(kv_len - (p.causal ? tokens : 1), 0) / TILE - window + 1, 1);
}
DEVICE int first_residual_tile_of(const DecodeParams& p, const QueryBlock& block, int kv_len) {
    if (!Config::LEAVES_SPANS) return first_residual_tile_of(p, block.tokens, kv_len);
    int first = max(p.causal ? first_position(p, block, kv_len) : last_position(p, block, kv_len), 0) / TILE - WINDOW + 1;
    return WINDOW == 0 ? 0x7fffffff : max(first, has_first_tile(p, block.sequence) ? 1 : 0);
}
// Whether some rows read a tile with residuals; `behind`: see `first_residual_tile_of`. Without wrapping, two comparisons would take registers that kernels lack.
DEVICE bool has_residuals(int tile, int behind, bool has_first) { return WINDOW && (u32)(tile - has_first) >= (u32)(behind - has_first); }

// ---- the launch ahead ----

// Parameters are constants that come from L2 64 bytes at a time, when they are first read: here, while the launch ahead still runs.
DEVICE void touch_params(const DecodeParams& p, u32 nowhere) {
    u64 addresses = (u64)p.q ^ (u64)p.page_table ^ (u64)p.kv_lens ^ (u64)p.counters;
    sts32(nowhere, (u32)addresses ^ p.batch ^ p.max_partials ^ p.heads_per_kv_divmod.shift ^ p.sms_divmod.shift);
}

// Called before anything is read that an earlier launch writes. Behind an append only the pages that it writes are missing.
DEVICE void after_dependencies(const DecodeParams& p) {
    launch_dependents();
    if (p.appended == 0) wait_for_dependencies();
}

}  // namespace attn
