/* Decode over an int8 cache from C: a prompt, a fork of it, a token for each, and the same bits alone and in a batch.

   cc -O2 -I include examples/decode.c -L ../../target/release -lattn_c -lm -o decode && LD_LIBRARY_PATH=../../target/release ./decode [device] */
#include "attn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q_HEADS = 8, KV_HEADS = 2, DIM = 64, PROMPT = 100, KV_ROW = KV_HEADS * DIM, Q_ROW = Q_HEADS * DIM };

/* Ends the program with the library's sentence. */
static void check(attn_status status) {
    if (status != ATTN_STATUS_OK) {
        fprintf(stderr, "attn: %s: %s\n", attn_status_name(status), attn_last_error());
        exit(1);
    }
}

/* Numbers as a model's K, V and queries have them: between -1 and 1. */
static void fill(float *x, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static void append(attn_cache *cache, size_t sequence, size_t tokens, unsigned seed) {
    float *k = malloc(tokens * KV_ROW * sizeof *k), *v = malloc(tokens * KV_ROW * sizeof *v);
    fill(k, tokens * KV_ROW, seed);
    fill(v, tokens * KV_ROW, seed + 1);
    attn_append which = {.sequence = sequence, .tokens = tokens};
    attn_tokens rows = {.struct_size = sizeof rows, .k = k, .v = v, .dtype = ATTN_DTYPE_F32};
    check(attn_cache_append(cache, &which, 1, &rows));
    free(k);
    free(v);
}

/* One query token of each of `count` sequences. */
static void attend(attn_cache *cache, size_t count, const size_t *sequences, const float *q, float *out) {
    attn_step step = {.struct_size = sizeof step, .q_heads = Q_HEADS, .count = count, .sequences = sequences};
    attn_rows rows = {.struct_size = sizeof rows, .q = q, .out = out, .dtype = ATTN_DTYPE_F32};
    check(attn_cache_attend(cache, &step, &rows));
}

int main(int argc, char **argv) {
    if (attn_abi_version() != ATTN_ABI_VERSION) {
        fprintf(stderr, "attn.h is of version %u of the interface, and the library of %u\n", ATTN_ABI_VERSION, attn_abi_version());
        return 1;
    }
    attn_device *device;
    check(attn_device_open(argc > 1 ? argv[1] : NULL, &device));
    printf("attn %s on %s\n", attn_version(), attn_device_name(device));

    attn_cache_config config = {
        .struct_size = sizeof config,
        .format = "int8",
        .kv_heads = KV_HEADS,
        .head_dim = DIM,
        .sequences = 2,
        .max_tokens = 1024,
    };
    attn_cache *cache;
    check(attn_cache_create(device, &config, &cache));

    /* A prompt, and a second sequence that shares its pages until they differ. */
    append(cache, 0, PROMPT, 1);
    check(attn_cache_fork(cache, 0, 1));
    append(cache, 0, 1, 3);
    append(cache, 1, 1, 5);

    float q[2 * Q_ROW], both[2 * Q_ROW], alone[Q_ROW];
    fill(q, 2 * Q_ROW, 7);
    const size_t sequences[2] = {0, 1};
    attend(cache, 2, sequences, q, both);
    attend(cache, 1, &sequences[1], q + Q_ROW, alone);
    if (memcmp(alone, both + Q_ROW, sizeof alone) != 0) {
        fprintf(stderr, "a sequence has other bits alone than in a batch\n");
        return 1;
    }

    /* A rejected draft leaves no trace. */
    append(cache, 1, 3, 9);
    check(attn_cache_truncate(cache, 1, PROMPT + 1));
    attend(cache, 1, &sequences[1], q + Q_ROW, alone);
    if (memcmp(alone, both + Q_ROW, sizeof alone) != 0) {
        fprintf(stderr, "a draft that was taken back left a trace\n");
        return 1;
    }

    float norm = 0;
    for (size_t i = 0; i < Q_ROW; i++) norm += alone[i] * alone[i];
    if (!(isfinite(norm) && norm > 0)) {
        fprintf(stderr, "the output's norm is %f\n", sqrt(norm));
        return 1;
    }
    attn_cache_stats stats;
    check(attn_cache_get_stats(cache, &stats));
    printf("output's norm %.4f, %zu of %zu pages of %zu bytes in use\n", sqrt(norm), stats.pages - stats.free_pages, stats.pages, stats.page_bytes);
    printf("the same bits alone, in a batch, and after a draft that was taken back\n");
    attn_cache_destroy(cache);
    attn_device_close(device);
    return 0;
}
