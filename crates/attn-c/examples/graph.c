/* A decode step of an engine in a CUDA graph: the caller's own pages and tables, captured once, run for every token.

   cc -O2 -I include -I $CUDA_HOME/include examples/graph.c -L ../../target/release -lattn_c -L $CUDA_HOME/lib64 -lcudart -lm -o graph

   Each token's output is compared, to the bit, with that of a cache on the CPU. */
#include "attn.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q_HEADS = 8, KV_HEADS = 2, DIM = 64, BATCH = 3, LONGEST = 512, PAGE = 64, STEPS = 200 };
enum { PAGES = LONGEST / PAGE, KV_ROW = KV_HEADS * DIM, Q_ROW = Q_HEADS * DIM };

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

static void *on_gpu(size_t bytes) {
    void *memory = NULL;
    cuda(cudaMalloc(&memory, bytes ? bytes : 1));
    cuda(cudaMemset(memory, 0, bytes ? bytes : 1));
    return memory;
}

static void fill(float *x, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

int main(void) {
    attn_device *gpu, *cpu;
    check(attn_device_open("cuda", &gpu));
    check(attn_device_open("cpu", &cpu));
    cuda(cudaSetDevice(0)); /* The primary context, which the plan uses, is current. */
    printf("attn %s on %s\n", attn_version(), attn_device_name(gpu));

    attn_plan_config shape = {
        .struct_size = sizeof shape, .format = "int8", .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .head_dim = DIM, .page_size = PAGE, .count = BATCH, .max_tokens = LONGEST};
    attn_plan *plan;
    check(attn_plan_create(gpu, &shape, &plan));
    /* Kernels of smaller batches and shorter sequences: no step waits for a compiler later. */
    size_t kernels;
    check(attn_plan_load_smaller(plan, &kernels));
    attn_plan_info info;
    check(attn_plan_get_info(plan, &info));

    /* The engine's memory. Sequence b has the pages b, b + BATCH, b + 2·BATCH and so on. */
    int table[BATCH][PAGES], lengths[BATCH];
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < PAGES; i++) table[b][i] = b + BATCH * i;
    int *d_table = on_gpu(sizeof table), *d_lengths = on_gpu(sizeof lengths);
    float *d_k = on_gpu(BATCH * KV_ROW * 4), *d_v = on_gpu(BATCH * KV_ROW * 4), *d_q = on_gpu(BATCH * Q_ROW * 4), *d_out = on_gpu(BATCH * Q_ROW * 4);
    cuda(cudaMemcpy(d_table, table, sizeof table, cudaMemcpyHostToDevice));
    attn_pages pages = {.struct_size = sizeof pages,
                        .pool = on_gpu(info.page_bytes * BATCH * PAGES),
                        .num_pages = BATCH * PAGES,
                        .page_table = d_table,
                        .page_table_stride = PAGES,
                        .kv_lens = d_lengths};
    attn_tokens tokens = {.struct_size = sizeof tokens, .k = d_k, .v = d_v, .dtype = ATTN_DTYPE_F32};
    attn_rows rows = {.struct_size = sizeof rows, .q = d_q, .out = d_out, .dtype = ATTN_DTYPE_F32};
    attn_buffers buffers = {.struct_size = sizeof buffers, .workspace = on_gpu(info.workspace_bytes)};

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cuda(cudaStreamCreate(&stream));
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    check(attn_plan_step(plan, &pages, &tokens, 1, &rows, &buffers, stream));
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&run, graph, 0));

    /* The same tokens on the CPU. */
    attn_cache_config config = {
        .struct_size = sizeof config, .format = "int8", .kv_heads = KV_HEADS, .head_dim = DIM, .sequences = BATCH, .max_tokens = LONGEST, .page_size = PAGE};
    attn_cache *cache;
    check(attn_cache_create(cpu, &config, &cache));
    const attn_append appends[BATCH] = {{0, 1}, {1, 1}, {2, 1}};
    const size_t sequences[BATCH] = {0, 1, 2};
    attn_step step = {.struct_size = sizeof step, .q_heads = Q_HEADS, .count = BATCH, .sequences = sequences};

    static float k[BATCH * KV_ROW], v[BATCH * KV_ROW], q[BATCH * Q_ROW], out[BATCH * Q_ROW], expected[BATCH * Q_ROW];
    for (int t = 1; t <= STEPS; t++) {
        fill(k, BATCH * KV_ROW, 3 * t);
        fill(v, BATCH * KV_ROW, 3 * t + 1);
        fill(q, BATCH * Q_ROW, 3 * t + 2);
        for (int b = 0; b < BATCH; b++) lengths[b] = t;
        cuda(cudaMemcpyAsync(d_k, k, sizeof k, cudaMemcpyHostToDevice, stream));
        cuda(cudaMemcpyAsync(d_v, v, sizeof v, cudaMemcpyHostToDevice, stream));
        cuda(cudaMemcpyAsync(d_q, q, sizeof q, cudaMemcpyHostToDevice, stream));
        cuda(cudaMemcpyAsync(d_lengths, lengths, sizeof lengths, cudaMemcpyHostToDevice, stream));
        cuda(cudaGraphLaunch(run, stream));
        cuda(cudaMemcpyAsync(out, d_out, sizeof out, cudaMemcpyDeviceToHost, stream));
        cuda(cudaStreamSynchronize(stream));

        attn_tokens new_tokens = {.struct_size = sizeof new_tokens, .k = k, .v = v, .dtype = ATTN_DTYPE_F32};
        attn_rows on_cpu = {.struct_size = sizeof on_cpu, .q = q, .out = expected, .dtype = ATTN_DTYPE_F32};
        check(attn_cache_append(cache, appends, BATCH, &new_tokens));
        check(attn_cache_attend(cache, &step, &on_cpu));
        if (memcmp(out, expected, sizeof out) != 0) {
            fprintf(stderr, "token %d has other bits on the GPU than on the CPU\n", t);
            return 1;
        }
    }
    printf("%d tokens of %d sequences from one CUDA graph, %zu kernels loaded: the bits of the CPU\n", STEPS, BATCH, kernels);
    cuda(cudaGraphExecDestroy(run));
    cuda(cudaStreamSynchronize(stream));
    attn_plan_destroy(plan);
    attn_cache_destroy(cache);
    attn_device_close(gpu);
    attn_device_close(cpu);
    return 0;
}
