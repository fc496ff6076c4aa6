/* Another engine's cache, pages of bf16 rows, attended as it lies in both orders of dims: an engine can try attn before it changes its cache.

   cc -O2 -I include -I $CUDA_HOME/include examples/rows.c -L ../../target/release -lattn_c -L $CUDA_HOME/lib64 -lcudart -lm -o rows

   The results of both orders have the same bits, and are those of a bf16 cache on the CPU within float rounding. */
#include "attn.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q_HEADS = 8, KV_HEADS = 2, DIM = 128, BATCH = 3, LONGEST = 700, PAGE = 16, PAGES = (LONGEST + PAGE - 1) / PAGE, POOL = BATCH * PAGES };
enum { KV_ROW = KV_HEADS * DIM, Q_ROW = Q_HEADS * DIM };

static void check(attn_status status) {
    if (status != ATTN_STATUS_OK) {
        fprintf(stderr, "attn: %s: %s\n", attn_status_name(status), attn_last_error());
        exit(1);
    }
}

static void cuda(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "cuda: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

static void *on_gpu(const void *host, size_t bytes) {
    void *memory = NULL;
    cuda(cudaMalloc(&memory, bytes ? bytes : 1));
    cuda(host ? cudaMemcpy(memory, host, bytes, cudaMemcpyHostToDevice) : cudaMemset(memory, 0, bytes));
    return memory;
}

static unsigned seed = 7;

/* A number between -1 and 1 that bf16 has, and its bits. */
static float number(uint16_t *bits) {
    seed = seed * 1664525u + 1013904223u;
    float x = (float)(seed >> 8) / 8388608.0f - 1.0f;
    uint32_t word;
    memcpy(&word, &x, 4);
    word &= 0xffff0000u;
    memcpy(&x, &word, 4);
    if (bits) *bits = (uint16_t)(word >> 16);
    return x;
}

int main(void) {
    attn_device *gpu, *cpu;
    check(attn_device_open("cuda", &gpu));
    check(attn_device_open("cpu", &cpu));
    cuda(cudaSetDevice(0)); /* The primary context, which the plan uses, is current. */
    printf("attn %s on %s\n", attn_version(), attn_device_name(gpu));

    attn_plan_config shape = {.struct_size = sizeof shape,
                              .format = "bf16",
                              .q_heads = Q_HEADS,
                              .kv_heads = KV_HEADS,
                              .head_dim = DIM,
                              .page_size = PAGE,
                              .count = BATCH,
                              .max_tokens = LONGEST,
                              .rows = 1};
    attn_plan *plan;
    check(attn_plan_create(gpu, &shape, &plan));
    attn_plan_info info;
    check(attn_plan_get_info(plan, &info));
    attn_cache_config config = {.struct_size = sizeof config, .format = "bf16", .kv_heads = KV_HEADS, .head_dim = DIM, .sequences = BATCH, .max_tokens = LONGEST};
    attn_cache *cache;
    check(attn_cache_create(cpu, &config, &cache));

    /* K and V as [pages][tokens][kv_heads][head_dim] and as [pages][kv_heads][tokens][head_dim]; sequence b's pages are b, b + BATCH and so on. */
    static uint16_t by_token[2][POOL][PAGE][KV_HEADS][DIM], by_head[2][POOL][KV_HEADS][PAGE][DIM];
    static float rows[2][LONGEST][KV_HEADS][DIM];
    int table[BATCH][PAGES], lengths[BATCH] = {1, LONGEST, 64};
    for (int b = 0; b < BATCH; b++) {
        for (int i = 0; i < PAGES; i++) table[b][i] = b + BATCH * i;
        for (int part = 0; part < 2; part++)
            for (int t = 0; t < lengths[b]; t++)
                for (int h = 0; h < KV_HEADS; h++)
                    for (int d = 0; d < DIM; d++) {
                        uint16_t bits;
                        rows[part][t][h][d] = number(&bits);
                        by_token[part][table[b][t / PAGE]][t % PAGE][h][d] = by_head[part][table[b][t / PAGE]][h][t % PAGE][d] = bits;
                    }
        attn_append which = {.sequence = (size_t)b, .tokens = (size_t)lengths[b]};
        attn_tokens tokens = {.struct_size = sizeof tokens, .k = rows[0], .v = rows[1], .dtype = ATTN_DTYPE_F32};
        check(attn_cache_append(cache, &which, 1, &tokens));
    }
    static float q[BATCH * Q_ROW], expected[BATCH * Q_ROW], out[2][BATCH * Q_ROW];
    for (int i = 0; i < BATCH * Q_ROW; i++) q[i] = number(NULL);
    const size_t all[BATCH] = {0, 1, 2};
    attn_step step = {.struct_size = sizeof step, .q_heads = Q_HEADS, .count = BATCH, .sequences = all};
    attn_rows on_cpu = {.struct_size = sizeof on_cpu, .q = q, .out = expected, .dtype = ATTN_DTYPE_F32};
    check(attn_cache_attend(cache, &step, &on_cpu));

    float *d_out = on_gpu(NULL, sizeof expected);
    attn_rows on_device = {.struct_size = sizeof on_device, .q = on_gpu(q, sizeof q), .out = d_out, .dtype = ATTN_DTYPE_F32};
    attn_buffers buffers = {.struct_size = sizeof buffers, .workspace = on_gpu(NULL, info.workspace_bytes)};
    attn_paged_rows pages = {.struct_size = sizeof pages,
                             .num_pages = POOL,
                             .page_table = on_gpu(table, sizeof table),
                             .page_table_stride = PAGES,
                             .kv_lens = on_gpu(lengths, sizeof lengths),
                             .k_page_stride = PAGE * KV_ROW,
                             .v_page_stride = PAGE * KV_ROW};
    for (int order = 0; order < 2; order++) {
        const uint16_t *all_rows = order ? &by_head[0][0][0][0][0] : &by_token[0][0][0][0][0];
        pages.k = on_gpu(all_rows, sizeof by_token);
        pages.v = (const uint16_t *)pages.k + POOL * PAGE * KV_ROW;
        pages.k_token_stride = pages.v_token_stride = order ? DIM : KV_ROW;
        pages.k_head_stride = pages.v_head_stride = order ? PAGE * DIM : DIM;
        check(attn_plan_attend_rows(plan, &pages, &on_device, &buffers, NULL));
        cuda(cudaMemcpy(out[order], d_out, sizeof expected, cudaMemcpyDeviceToHost));
    }
    float worst = 0;
    for (int i = 0; i < BATCH * Q_ROW; i++) worst = fmaxf(worst, fabsf(out[0][i] - expected[i]));
    if (memcmp(out[0], out[1], sizeof out[0]) != 0 || !(worst < 1e-4f)) {
        fprintf(stderr, "the orders differ, or the results are %g from the CPU's\n", worst);
        return 1;
    }
    /* What the plan does not do is refused by name. */
    attn_pages own = {.struct_size = sizeof own};
    if (attn_plan_attend(plan, &own, &on_device, &buffers, NULL) != ATTN_STATUS_PARAMETER) return 1;
    printf("refused, as it should be: %s\n", attn_last_error());
    printf("both orders of dims have the same bits, %g from the CPU's\n", worst);
    return 0;
}
