/* Context parallelism: two shards of a batch's tokens, each attended by a plan and in pages of its own, and merged into the bits of one plan over all.

   cc -O2 -I include -I $CUDA_HOME/include examples/shards.c -L ../../target/release -lattn_c -L $CUDA_HOME/lib64 -lcudart -o shards

   Both shards lie on one GPU here. On several, each has one, and an all-gather of its max_sums and o leaves them one behind the other, as here. */
#include "attn.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { Q_HEADS = 8, KV_HEADS = 2, DIM = 128, BATCH = 2, PAGE = 64, SPAN = 1024, SHARDS = 2, SHARE = 2 * SPAN, LONGEST = SHARDS * SHARE, STEPS = 20 };
enum { KV_ROW = KV_HEADS * DIM, Q_ROW = Q_HEADS * DIM, ROWS = BATCH * Q_HEADS, SPANS = SHARE / SPAN };

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

static void expect(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
}

/* Zeros, or the bytes at `from`. */
static void *on_gpu(size_t bytes, const void *from) {
    void *memory = NULL;
    cuda(cudaMalloc(&memory, bytes ? bytes : 1));
    cuda(from ? cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice) : cudaMemset(memory, 0, bytes ? bytes : 1));
    return memory;
}

static unsigned seed = 11;

/* Rows of numbers between -1 and 1, in device memory. */
static void fill(float *device, size_t count) {
    static float x[LONGEST * KV_ROW];
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    cuda(cudaMemcpy(device, x, count * sizeof *x, cudaMemcpyHostToDevice));
}

/* The positions from `first` on, `room` of them, of each sequence. Its page i of sequence b is b + BATCH·i. */
struct shard {
    size_t first, room;
    attn_plan *plan;
    attn_pages pages;
    attn_buffers buffers;
    int *lengths, *before, *after; /* On the device: tokens here, those in shards ahead, and those that follow in others. */
    int64_t *slots;
};

static struct shard shard_of(attn_device *gpu, size_t first, size_t room, attn_plan_config shape) {
    struct shard s = {.first = first, .room = room};
    const size_t pages = room / PAGE;
    static int table[BATCH * LONGEST / PAGE];
    for (size_t i = 0; i < BATCH * pages; i++) table[i] = (int)(i / pages + BATCH * (i % pages));
    shape.max_tokens = room;
    check(attn_plan_create(gpu, &shape, &s.plan));
    attn_plan_info info;
    check(attn_plan_get_info(s.plan, &info));
    expect(info.spans == (shape.spans ? room / SPAN : 0), "spans of a plan");
    s.lengths = on_gpu(BATCH * sizeof *s.lengths, NULL);
    int before[BATCH];
    for (int b = 0; b < BATCH; b++) before[b] = (int)first;
    s.before = on_gpu(sizeof before, before);
    s.after = on_gpu(BATCH * sizeof *s.after, NULL);
    s.slots = on_gpu(LONGEST * sizeof *s.slots, NULL);
    s.pages = (attn_pages){.struct_size = sizeof s.pages,
                           .pool = on_gpu(info.page_bytes * BATCH * pages, NULL),
                           .num_pages = BATCH * pages,
                           .page_table = on_gpu(BATCH * pages * sizeof *table, table),
                           .page_table_stride = pages,
                           .kv_lens = s.lengths};
    s.buffers = (attn_buffers){.struct_size = sizeof s.buffers, .workspace = on_gpu(info.workspace_bytes, NULL)};
    return s;
}

/* A sequence's token. */
struct place {
    size_t sequence, position;
};

/* Appends those of the tokens whose positions are the shard's, and notes the sequences' lengths. */
static void append(const struct shard *s, const attn_tokens *tokens, const struct place *places, size_t count, const size_t *lens) {
    static int64_t slots[LONGEST];
    for (size_t i = 0; i < count; i++) {
        const size_t own = places[i].position - s->first; /* Wraps, so is beyond room, where the token is before the shard. */
        slots[i] = own < s->room ? (int64_t)((places[i].sequence + BATCH * (own / PAGE)) * PAGE + own % PAGE) : -1;
    }
    int lengths[BATCH], after[BATCH];
    for (int b = 0; b < BATCH; b++) {
        const size_t behind = lens[b] > s->first ? lens[b] - s->first : 0;
        lengths[b] = (int)(behind < s->room ? behind : s->room);
        after[b] = (int)behind - lengths[b];
    }
    cuda(cudaMemcpy(s->slots, slots, count * sizeof *slots, cudaMemcpyHostToDevice));
    cuda(cudaMemcpy(s->lengths, lengths, sizeof lengths, cudaMemcpyHostToDevice));
    cuda(cudaMemcpy(s->after, after, sizeof after, cudaMemcpyHostToDevice));
    check(attn_plan_append_slots(s->plan, &s->pages, tokens, s->slots, NULL, count, NULL));
}

int main(void) {
    attn_device *gpu;
    check(attn_device_open("cuda", &gpu));
    cuda(cudaSetDevice(0)); /* The primary context, which the launches use, is current. */
    printf("attn %s on %s\n", attn_version(), attn_device_name(gpu));

    /* Sinks join the softmax once: in the merge, and in no shard. */
    const float sinks[Q_HEADS] = {0.5f, -2.0f, 6.0f, 0.0f, 3.0f, -1e6f, 1.0f, 9.0f};
    attn_plan_config shape = {
        .struct_size = sizeof shape, .format = "int8", .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .head_dim = DIM, .page_size = PAGE, .count = BATCH, .spans = 1};
    struct shard shards[SHARDS];
    for (int i = 0; i < SHARDS; i++) shards[i] = shard_of(gpu, (size_t)i * SHARE, SHARE, shape);
    shape.spans = 0;
    shape.modifiers.sinks = sinks;
    struct shard whole = shard_of(gpu, 0, LONGEST, shape);
    whole.buffers.sinks = on_gpu(sizeof sinks, sinks);
    attn_transfer_config caches = {.struct_size = sizeof caches, .format = "int8", .kv_heads = KV_HEADS, .head_dim = DIM, .page_size = PAGE};
    attn_transfer *transfer;
    check(attn_transfer_create(gpu, &caches, &transfer));

    const size_t sums_bytes = SHARDS * SPANS * ROWS * 2 * sizeof(float), o_bytes = SHARDS * SPANS * ROWS * DIM * sizeof(float);
    float *k = on_gpu(LONGEST * KV_ROW * sizeof *k, NULL), *v = on_gpu(LONGEST * KV_ROW * sizeof *v, NULL), *q = on_gpu(BATCH * Q_ROW * sizeof *q, NULL);
    float *max_sums = on_gpu(sums_bytes, NULL), *o = on_gpu(o_bytes, NULL);
    static float found[2][BATCH * Q_ROW], found_lse[2][ROWS];
    attn_tokens tokens = {.struct_size = sizeof tokens, .k = k, .v = v, .dtype = ATTN_DTYPE_F32};
    attn_rows rows = {.struct_size = sizeof rows, .q = q, .out = on_gpu(sizeof found[0], NULL), .dtype = ATTN_DTYPE_F32, .lse = on_gpu(sizeof found_lse[0], NULL)};
    attn_span_merge merge = {.struct_size = sizeof merge,
                             .max_sums = max_sums,
                             .o = o,
                             .states = SHARDS * SPANS,
                             .rows = ROWS,
                             .q_heads = Q_HEADS,
                             .out = on_gpu(sizeof found[1], NULL),
                             .dtype = ATTN_DTYPE_F32,
                             .lse = on_gpu(sizeof found_lse[1], NULL),
                             .sinks = whole.buffers.sinks};

    /* Prompts, then a token of each sequence in a step: the first one grows into the second shard, the other one stays in the first. */
    const size_t prompts[BATCH] = {SHARE - STEPS / 2, 700};
    size_t lens[BATCH] = {0, 0};
    static struct place places[LONGEST];
    for (int step = 0; step <= STEPS; step++) {
        size_t count = 0;
        for (size_t b = 0; b < BATCH; b++)
            for (size_t end = lens[b] + (step ? 1 : prompts[b]); lens[b] < end; lens[b]++) places[count++] = (struct place){b, lens[b]};
        fill(k, count * KV_ROW);
        fill(v, count * KV_ROW);
        fill(q, BATCH * Q_ROW);

        append(&whole, &tokens, places, count, lens);
        check(attn_plan_attend(whole.plan, &whole.pages, &rows, &whole.buffers, NULL));

        /* NaN: what a shard does not write shows. */
        cuda(cudaMemset(max_sums, 0xff, sums_bytes));
        cuda(cudaMemset(o, 0xff, o_bytes));
        for (int i = 0; i < SHARDS; i++) {
            const struct shard *s = &shards[i];
            attn_spans spans = {.struct_size = sizeof spans,
                                .tokens_before = s->before,
                                .tokens_after = s->after,
                                .max_sums = max_sums + i * SPANS * ROWS * 2,
                                .o = o + i * SPANS * ROWS * DIM};
            append(s, &tokens, places, count, lens);
            check(attn_plan_attend_spans(s->plan, &s->pages, &rows, &s->buffers, &spans, NULL));
        }
        check(attn_transfer_merge_spans(transfer, &merge, NULL));
        cuda(cudaMemcpy(found[0], rows.out, sizeof found[0], cudaMemcpyDeviceToHost));
        cuda(cudaMemcpy(found[1], merge.out, sizeof found[1], cudaMemcpyDeviceToHost));
        cuda(cudaMemcpy(found_lse[0], rows.lse, sizeof found_lse[0], cudaMemcpyDeviceToHost));
        cuda(cudaMemcpy(found_lse[1], merge.lse, sizeof found_lse[1], cudaMemcpyDeviceToHost));
        expect(memcmp(found[0], found[1], sizeof found[0]) == 0, "outputs of the shards");
        expect(memcmp(found_lse[0], found_lse[1], sizeof found_lse[0]) == 0, "log-sum-exps of the shards");
    }
    /* The first shard alone has other results of the first sequence, and all of the other one's. */
    merge.states = SPANS;
    check(attn_transfer_merge_spans(transfer, &merge, NULL));
    cuda(cudaMemcpy(found[1], merge.out, sizeof found[1], cudaMemcpyDeviceToHost));
    expect(memcmp(found[0], found[1], Q_ROW * sizeof(float)) != 0, "the second shard counts nothing");
    expect(memcmp(found[0] + Q_ROW, found[1] + Q_ROW, Q_ROW * sizeof(float)) == 0, "an empty shard counts");
    /* What a shard's plan does not do is refused by name. */
    expect(attn_plan_attend(shards[0].plan, &shards[0].pages, &rows, &shards[0].buffers, NULL) == ATTN_STATUS_PARAMETER, "a shard's results");
    printf("refused, as it should be: %s\n", attn_last_error());
    printf("%d steps over %d shards: the bits of one plan over all %d tokens\n", STEPS + 1, SHARDS, (int)(lens[0] + lens[1]));
    attn_transfer_destroy(transfer);
    attn_plan_destroy(whole.plan);
    for (int i = 0; i < SHARDS; i++) attn_plan_destroy(shards[i].plan);
    attn_device_close(gpu);
    return 0;
}
