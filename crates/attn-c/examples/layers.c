/* A model's step over one cache for all of its layers: counted once, written and attended layer by layer, taken back whole when a layer fails; and
   pages that no window sees any more.

   cc -O2 -I include examples/layers.c -L ../../target/release -lattn_c -lm -o layers && LD_LIBRARY_PATH=../../target/release ./layers [device] */
#include "attn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, Q_HEADS = 8, KV_HEADS = 2, DIM = 64, PROMPT = 300, WINDOW = 100, KV_ROW = KV_HEADS * DIM, Q_ROW = Q_HEADS * DIM };

/* Ends the program with the library's sentence. */
static void check(attn_status status) {
    if (status != ATTN_STATUS_OK) {
        fprintf(stderr, "attn: %s: %s\n", attn_status_name(status), attn_last_error());
        exit(1);
    }
}

static void fill(float *x, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

/* One query token of the sequence, in a layer of this window. */
static void attend(attn_cache *cache, size_t layer, const float *q, float *out) {
    size_t sequence = 0;
    attn_step step = {.struct_size = sizeof step, .q_heads = Q_HEADS, .count = 1, .sequences = &sequence, .modifiers = {.window = WINDOW}, .layer = layer};
    attn_rows rows = {.struct_size = sizeof rows, .q = q, .out = out, .dtype = ATTN_DTYPE_F32};
    check(attn_cache_attend(cache, &step, &rows));
}

static float k[PROMPT * KV_ROW], v[PROMPT * KV_ROW], q[LAYERS][Q_ROW], out[LAYERS][Q_ROW];

/* A step of `tokens` tokens; `broken` is a layer whose K has no number in it, or -1. Returns whether the step was done. */
static int step(attn_cache *cache, size_t tokens, unsigned seed, int broken) {
    attn_append which = {.sequence = 0, .tokens = tokens};
    attn_tokens rows = {.struct_size = sizeof rows, .k = k, .v = v, .dtype = ATTN_DTYPE_F32};
    check(attn_cache_reserve(cache, &which, 1));
    for (int layer = 0; layer < LAYERS; layer++) {
        /* A model computes its K, V and queries from the layer before. */
        fill(k, tokens * KV_ROW, seed + 3u * (unsigned)layer);
        fill(v, tokens * KV_ROW, seed + 3u * (unsigned)layer + 1);
        fill(q[layer], Q_ROW, seed + 3u * (unsigned)layer + 2);
        if (layer == broken) k[5] = NAN;
        if (attn_cache_write(cache, (size_t)layer, &rows) != ATTN_STATUS_OK) {
            printf("refused, as it should be: %s\n", attn_last_error());
            check(attn_cache_cancel_step(cache));
            return 0;
        }
        attend(cache, (size_t)layer, q[layer], out[layer]);
    }
    return 1;
}

static size_t used(attn_cache *cache) {
    attn_cache_stats stats;
    check(attn_cache_get_stats(cache, &stats));
    return stats.pages - stats.free_pages;
}

int main(int argc, char **argv) {
    attn_device *device;
    check(attn_device_open(argc > 1 ? argv[1] : NULL, &device));
    printf("attn %s on %s\n", attn_version(), attn_device_name(device));
    attn_cache_config config = {.struct_size = sizeof config, .format = "int8", .kv_heads = KV_HEADS, .head_dim = DIM, .max_tokens = 1024, .layers = LAYERS};
    attn_cache *cache;
    check(attn_cache_create(device, &config, &cache));

    if (!step(cache, PROMPT, 1, -1)) return 1;
    size_t pages = used(cache), tokens;
    static float own_q[Q_ROW], before[Q_ROW], after[Q_ROW];
    memcpy(own_q, q[1], sizeof own_q);
    memcpy(before, out[1], sizeof before);
    if (step(cache, 70, 50, 2)) return 1;
    check(attn_cache_tokens(cache, 0, &tokens));
    if (tokens != PROMPT || used(cache) != pages) {
        fprintf(stderr, "a step that was taken back left a trace\n");
        return 1;
    }
    /* A query behind the prompt sees its last WINDOW - 1 tokens; those before go by whole tiles of 64. */
    check(attn_cache_drop_before(cache, 0, PROMPT - WINDOW + 1));
    attend(cache, 1, own_q, after);
    if (memcmp(before, after, sizeof after) != 0 || used(cache) + 3 != pages) {
        fprintf(stderr, "dropped tokens moved a bit, or kept their pages\n");
        return 1;
    }
    if (!step(cache, 1, 90, -1)) return 1;
    check(attn_cache_tokens(cache, 0, &tokens));
    printf("%d layers of %zu tokens in %zu pages each; the same bits after a step that was taken back and tokens that were dropped\n", LAYERS, tokens, used(cache));
    attn_cache_destroy(cache);
    attn_device_close(device);
    return 0;
}
