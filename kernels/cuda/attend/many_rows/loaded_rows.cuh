// Query rows of many_rows.cu that are loaded ahead (LOADS_AHEAD): while a warpgroup attends a work item, the rows of the next one come into the other of its two buffers.
#pragma once
#include "attend/many_rows/work.cuh"

namespace attn {

// What a buffer has beside queries.
struct LoadedRows {
    WorkRange range;
    QueryBlock queries;
    bool is_end;  // there is no further work item, and nothing else
    float lifts[64];  // powers of two that rows were multiplied by
};
static_assert(sizeof(LoadedRows) <= LOADED_BYTES, "many_rows/shared_memory.cuh");

// The buffers of a warpgroup, and which of them comes next.
struct RowBuffers {
    u8* loaded;
    u32 queries, barriers;  // shared addresses; barriers: full[ROW_BUFFERS], then empty[ROW_BUFFERS]
    int buffer;
    u32 phase;

    DEVICE RowBuffers of_warpgroup(u8* shared, int warpgroup) {
        const int first = warpgroup * Config::ROW_BUFFERS;
        return {shared + SharedMemory::LOADED + first * LOADED_BYTES, shared_address(shared) + SharedMemory::QUERIES + first * QUERY_BYTES,
                shared_address(shared) + SharedMemory::LOADED_BARRIERS + first * 16, 0, 0};
    }
    // One thread of a warpgroup's, before they are used.
    METHOD void init() const {
        for (int i = 0; i < Config::ROW_BUFFERS; i++) {
            barrier_init(barriers + i * 8, ARRIVALS);
            barrier_init(barriers + (Config::ROW_BUFFERS + i) * 8, 4 * ARRIVALS);
        }
        barrier_init_fence();
    }
    METHOD u32 full() const { return barriers + buffer * 8; }
    METHOD u32 empty() const { return barriers + (Config::ROW_BUFFERS + buffer) * 8; }
    METHOD u32 at() const { return queries + buffer * QUERY_BYTES; }
    METHOD LoadedRows& rows() const { return *(LoadedRows*)(loaded + buffer * LOADED_BYTES); }
    // The loader has filled the buffer, or a warp that attends has read it.
    METHOD void pass_on(u32 barrier, int lane) {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(barrier);
        if (++buffer == Config::ROW_BUFFERS) {
            buffer = 0;
            phase ^= 1;
        }
    }
};

}  // namespace attn
