/* An engine's own pages in host memory: a pool of blocks, a page table and lengths that the engine keeps, on the CPU.

   Two sequences share the pages of their prompt, as a prefix cache lets them; each goes on in a page of its own. */
#include "attn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q_HEADS = 4, KV_HEADS = 2, DIM = 64, PAGE = 64, POOL = 8, PROMPT = 128, KV_ROW = KV_HEADS * DIM, Q_ROW = Q_HEADS * DIM };

static void check(attn_status status) {
    if (status == ATTN_STATUS_OK) return;
    fprintf(stderr, "status %d: %s\n", (int)status, attn_last_error());
    exit(1);
}

static void fill(float *x, size_t n, unsigned seed) {
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

int main(void) {
    attn_host_pages_config config = {.struct_size = sizeof config, .format = "int8", .kv_heads = KV_HEADS, .head_dim = DIM, .page_size = PAGE};
    attn_host_pages *pages;
    check(attn_host_pages_create(&config, &pages));
    size_t bytes = POOL * attn_host_pages_page_bytes(pages);
    uint8_t *pool = malloc(bytes);
    if (!pool) return 1;

    /* The prompt lies on pages 5 and 1; then one token for each sequence, on pages 3 and 6. */
    const int32_t table[2][3] = {{5, 1, 3}, {5, 1, 6}}, lengths[2] = {PROMPT + 1, PROMPT + 1};
    static float k[(PROMPT + 2) * KV_ROW], v[(PROMPT + 2) * KV_ROW], q[2 * Q_ROW], out[2][2 * Q_ROW];
    int64_t slots[PROMPT + 2];
    for (int t = 0; t < PROMPT; t++) slots[t] = table[0][t / PAGE] * PAGE + t % PAGE;
    for (int b = 0; b < 2; b++) slots[PROMPT + b] = table[b][2] * PAGE;
    fill(k, sizeof k / sizeof *k, 1);
    fill(v, sizeof v / sizeof *v, 2);
    fill(q, sizeof q / sizeof *q, 3);
    attn_tokens tokens = {.struct_size = sizeof tokens, .k = k, .v = v, .dtype = ATTN_DTYPE_F32};
    check(attn_host_pages_append_slots(pages, pool, bytes, slots, PROMPT + 2, &tokens));

    attn_host_step step = {
        .struct_size = sizeof step, .q_heads = Q_HEADS, .pool = pool, .pool_bytes = bytes, .count = 2, .page_table = table[0], .page_table_stride = 3, .kv_lens = lengths};
    attn_rows rows = {.struct_size = sizeof rows, .q = q, .out = out[0], .dtype = ATTN_DTYPE_F32};
    check(attn_host_pages_attend(pages, &step, &rows));
    /* Each alone. */
    for (int b = 0; b < 2; b++) {
        step.count = 1;
        step.page_table = table[b];
        rows.q = q + b * Q_ROW;
        rows.out = out[1] + b * Q_ROW;
        check(attn_host_pages_attend(pages, &step, &rows));
    }
    if (memcmp(out[0], out[1], sizeof out[0]) != 0) {
        fprintf(stderr, "a sequence alone has other bits than in the batch\n");
        return 1;
    }
    step.pool_bytes -= 1;
    if (attn_host_pages_attend(pages, &step, &rows) == ATTN_STATUS_OK) return 1;
    printf("refused, as it should be: %s\n", attn_last_error());
    printf("two sequences of %d tokens on 4 pages of %zu bytes: the same bits alone and in a batch\n", lengths[0], bytes / POOL);
    free(pool);
    attn_host_pages_destroy(pages);
    return 0;
}
