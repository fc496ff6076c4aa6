/* What an engine does with pages beside decoding: swaps them to the host and back, reads them as rows, and merges the results of shards.

   cc -O2 -I include -I $CUDA_HOME/include examples/transfer.c -L ../../target/release -lattn_c -L $CUDA_HOME/lib64 -lcudart -lm -o transfer

   A sequence that was swapped out and came back to other pages has the bits that it had. */
#include "attn.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q_HEADS = 8, KV_HEADS = 2, DIM = 64, TOKENS = 200, PAGE = 64, PAGES = 4, KV_ROW = KV_HEADS * DIM, Q_ROW = Q_HEADS * DIM };

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

/* Zeros, or the bytes at `from`. */
static void *on_gpu(size_t bytes, const void *from) {
    void *memory = NULL;
    cuda(cudaMalloc(&memory, bytes));
    cuda(cudaMemset(memory, 0, bytes));
    if (from) cuda(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
    return memory;
}

static void fill(float *x, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

/* Relative error of x against y. */
static double error_of(const float *x, const float *y, size_t count) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        error += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        norm += (double)y[i] * y[i];
    }
    return sqrt(error / norm);
}

static void expect(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
}

int main(void) {
    attn_device *gpu;
    check(attn_device_open("cuda", &gpu));
    cuda(cudaSetDevice(0)); /* The primary context, which the launches use, is current. */
    attn_plan_config shape = {
        .struct_size = sizeof shape, .format = "int8", .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .head_dim = DIM, .page_size = PAGE, .count = 1, .max_tokens = PAGE * PAGES};
    attn_plan *plan;
    check(attn_plan_create(gpu, &shape, &plan));
    attn_plan_info info;
    check(attn_plan_get_info(plan, &info));
    attn_transfer_config caches = {.struct_size = sizeof caches, .format = "int8", .kv_heads = KV_HEADS, .head_dim = DIM, .page_size = PAGE};
    attn_transfer *transfer;
    check(attn_transfer_create(gpu, &caches, &transfer));
    cudaStream_t stream;
    cuda(cudaStreamCreate(&stream));

    /* A sequence of 200 tokens in the pages 0 to 3. */
    static float k[TOKENS * KV_ROW], v[TOKENS * KV_ROW], q[Q_ROW];
    fill(k, TOKENS * KV_ROW, 1);
    fill(v, TOKENS * KV_ROW, 2);
    fill(q, Q_ROW, 3);
    int64_t slots[TOKENS];
    for (int t = 0; t < TOKENS; t++) slots[t] = t;
    const int table[PAGES] = {0, 1, 2, 3}, lengths[3] = {TOKENS, 2 * PAGE, TOKENS - 2 * PAGE}, row_starts[2] = {0, TOKENS};
    int *d_table = on_gpu(sizeof table, table), *d_lengths = on_gpu(sizeof lengths, lengths);
    attn_pages pages = {
        .struct_size = sizeof pages, .pool = on_gpu(info.page_bytes * PAGES, NULL), .num_pages = PAGES, .page_table = d_table, .page_table_stride = PAGES, .kv_lens = d_lengths};
    attn_tokens tokens = {.struct_size = sizeof tokens, .k = on_gpu(sizeof k, k), .v = on_gpu(sizeof v, v), .dtype = ATTN_DTYPE_F32};
    check(attn_plan_append_slots(plan, &pages, &tokens, on_gpu(sizeof slots, slots), NULL, TOKENS, stream));

    /* Results of the whole sequence, then of its first two pages and of the rest, as two devices would have them. */
    float *d_out = on_gpu(4 * Q_ROW * 4, NULL), *d_lse = on_gpu(4 * Q_HEADS * 4, NULL), *d_q = on_gpu(sizeof q, q);
    attn_buffers buffers = {.struct_size = sizeof buffers, .workspace = on_gpu(info.workspace_bytes, NULL)};
    for (int part = 0; part < 3; part++) {
        attn_rows rows = {.struct_size = sizeof rows, .q = d_q, .out = d_out + part * Q_ROW, .dtype = ATTN_DTYPE_F32, .lse = d_lse + part * Q_HEADS};
        attn_pages of_part = pages;
        of_part.page_table = on_gpu(sizeof table, part == 2 ? (const int[PAGES]){2, 3} : table);
        of_part.kv_lens = d_lengths + part;
        check(attn_plan_attend(plan, &of_part, &rows, &buffers, stream));
    }
    attn_merge merge = {.struct_size = sizeof merge,
                        .outs = d_out + Q_ROW,
                        .lses = d_lse + Q_HEADS,
                        .dtype = ATTN_DTYPE_F32,
                        .out = d_out + 3 * Q_ROW,
                        .out_dtype = ATTN_DTYPE_F32,
                        .lse = d_lse + 3 * Q_HEADS,
                        .states = 2,
                        .rows = Q_HEADS};
    check(attn_transfer_merge(transfer, &merge, stream));

    /* K as rows again, to the format's precision. */
    float *d_k = on_gpu(sizeof k, NULL);
    attn_ranges ranges = {
        .struct_size = sizeof ranges, .k = d_k, .dtype = ATTN_DTYPE_F32, .row_starts = on_gpu(sizeof row_starts, row_starts), .count = 1, .max_tokens = TOKENS};
    check(attn_transfer_export(transfer, &pages, &ranges, stream));

    /* Out to pinned host memory, and back into other pages. */
    void *host;
    cuda(cudaHostAlloc(&host, info.page_bytes * PAGES, cudaHostAllocDefault));
    const int64_t out_pairs[PAGES][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 3}}, in_pairs[PAGES + 1][2] = {{0, 3}, {1, 2}, {-1, 0}, {2, 1}, {3, 0}};
    attn_page_copies swap = {
        .struct_size = sizeof swap, .from = pages.pool, .from_pages = PAGES, .to = host, .to_pages = PAGES, .pairs = on_gpu(sizeof out_pairs, out_pairs), .count = PAGES};
    check(attn_transfer_pages(transfer, &swap, stream));
    cuda(cudaMemsetAsync(pages.pool, 0xff, info.page_bytes * PAGES, stream));
    swap = (attn_page_copies){
        .struct_size = sizeof swap, .from = host, .from_pages = PAGES, .to = pages.pool, .to_pages = PAGES, .pairs = on_gpu(sizeof in_pairs, in_pairs), .count = PAGES + 1};
    check(attn_transfer_pages(transfer, &swap, stream));
    static float out[4 * Q_ROW], again[Q_ROW], lse[4 * Q_HEADS], rows_of_k[TOKENS * KV_ROW];
    cuda(cudaMemcpyAsync(out, d_out, sizeof out, cudaMemcpyDeviceToHost, stream));
    pages.page_table = on_gpu(sizeof table, (const int[PAGES]){3, 2, 1, 0});
    attn_rows rows = {.struct_size = sizeof rows, .q = d_q, .out = d_out, .dtype = ATTN_DTYPE_F32};
    check(attn_plan_attend(plan, &pages, &rows, &buffers, stream));
    cuda(cudaMemcpyAsync(again, d_out, sizeof again, cudaMemcpyDeviceToHost, stream));
    cuda(cudaMemcpyAsync(lse, d_lse, sizeof lse, cudaMemcpyDeviceToHost, stream));
    cuda(cudaMemcpyAsync(rows_of_k, d_k, sizeof k, cudaMemcpyDeviceToHost, stream));
    cuda(cudaStreamSynchronize(stream));

    expect(memcmp(out, again, sizeof again) == 0, "bits after a swap");
    expect(error_of(rows_of_k, k, TOKENS * KV_ROW) < 0.01, "exported rows of K");
    expect(error_of(out + 3 * Q_ROW, out, Q_ROW) < 0.02, "merged outputs");
    expect(error_of(lse + 3 * Q_HEADS, lse, Q_HEADS) < 1e-4, "merged log-sum-exps");
    printf("%d tokens swapped out and in: the same bits; exported and merged to the format's precision\n", TOKENS);
    attn_transfer_destroy(transfer);
    attn_plan_destroy(plan);
    attn_device_close(gpu);
    return 0;
}
