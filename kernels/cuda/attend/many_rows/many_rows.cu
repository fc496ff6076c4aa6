// many_rows.cu: attention of 9 and more query rows to each KV head, up to whole prompts, with products of a warpgroup (sm_90a).
//
// Grid      persistent, a CTA to each SM; a warpgroup of producers and two that attend 64 rows each: one team for 128 rows, or two of 64; integers of few
//           rows have two of 32 (many_rows/warpgroup.cuh).
// Split     work items, (query block, KV head): where there are enough, teams take whole ones, the next each time, else runs of spans (many_rows/work.cuh).
// Pipeline  each team has a ring of stages, which its producer warp fills (pipeline.cuh). Products read keys and values from there; codes of 4 bits
//           are turned into bytes first, and those of fp8 into f16, by the warps of the producers, in a ring of their own.
//           Two warpgroups of a team that attend floats take turns with products (many_rows/floats.cuh).
// Merge     a segment's state is in registers, a span's in shared memory, the row's in the workspace: each thread has its own elements. Floats have no
//           segments, and a span's state is in registers. Parts of a work item by several teams meet in the workspace (partials_counted.cuh).
// Reads     q; pages; page table, lengths.
// Writes    out, lse; states, partials and arrival counts in the workspace.
// Numerics  docs/arithmetic.md for integers, many_rows/floats.cuh for floats. The order of every rounding is the same on every grid.
// Shared    many_rows/shared_memory.cuh.
// Host      kernels/src/cuda: select.rs (configuration), launch.rs, smem.rs; attn-cuda/src/native/launch_plan.rs.
#include "attend/many_rows/attender.cuh"
#include "attend/many_rows/shared_items.cuh"

static_assert(INTEGER || K_SCHEME == V_SCHEME, "select.rs");
static_assert((PAGE != 0 || !INTEGER) && K_GROUPS == 1 && V_GROUPS == 1, "select.rs");
static_assert(PRODUCTS_READ_STAGES && !INTEGER ? HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 : HEAD_DIM % 32 == 0 && HEAD_DIM <= 128, "select.rs");

constexpr int TEAM_BARRIER = 1;  // the first of the teams' named barriers
// Turning codes into f16 takes more registers than attending floats leaves unused.
constexpr int PRODUCER_REGISTERS = !UNPACKS ? 40 : INTEGER ? 56 : 104, ATTENDER_REGISTERS = !UNPACKS ? 232 : INTEGER ? 224 : 200;
static_assert(PRODUCER_REGISTERS + WARPGROUPS * ATTENDER_REGISTERS <= (1 + WARPGROUPS) * 168, "a CTA has no more than it starts with: a warpgroup would wait forever");

// Attends whole work items, and reserves the team's next ones.
template <class Queue> DEVICE void attend_items(Attender& self, Queue& queue, int team) {
    bool reserves = self.warpgroup % ROW_WARPS == 0 && self.warp == 0 && self.lane == 0;
    if (reserves) queue.publish(blockIdx.x * TEAMS + team);
    Part part;
#pragma unroll 1
    while (queue.next(self.p, part, self.lane)) {
        u32 item = reserves ? queue.reserve(self.p) : 0;  // is there some time later
        self.load_rows(part);
        if (reserves) queue.publish(item);
        self.attend(part);
    }
}
// Attends a run of spans, and merges those of work items that others have a part of.
template <class Walk> DEVICE void attend_runs(Attender& self, Walk& walk, const Meeting& meeting) {
    Claims claims = {};
    Part part;
#pragma unroll 1
    while (walk.next(self.p, part, self.lane)) {
        self.load_rows(part);
        if (self.attend(part)) meeting.count(part, claims);
    }
    meeting.finish(claims);
}
template <class Way> DEVICE void attend_all(Attender& self, Way way, int team, Arrival* arrival) {
    self.start();
    if constexpr (WHOLE_ITEMS) attend_items(self, way, team);
    else attend_runs(self, way, Meeting{self.p, arrival, TEAM_BARRIER + team});
    self.finish();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attn_decode(const __grid_constant__ DecodeParams p ATTN_ROW_MAPS) {
    SHARED_MEMORY(shared, STAGE_ALIGN);
    int warp = warp_id(), lane = lane_id();
    u32 base = shared_address(shared);
    auto barriers_of = [&](int team) { return base + SharedMemory::BARRIERS + team * STAGES * 16; };
    if (threadIdx.x < TEAMS * STAGES) Ring::init(barriers_of(threadIdx.x / STAGES), threadIdx.x % STAGES);
    auto unpacked_barriers_of = [&](int team) { return base + SharedMemory::BARRIERS + TEAMS * STAGES * 16 + team * UNPACKED_STAGES * 16; };
    if (UNPACKS && threadIdx.x < TEAMS * UNPACKED_STAGES) UnpackedRing::init(unpacked_barriers_of(threadIdx.x / larger(UNPACKED_STAGES, 1)), threadIdx.x % larger(UNPACKED_STAGES, 1));
    if (INTEGER && threadIdx.x < TILE) sts32(base + SharedMemory::THRESHOLDS + threadIdx.x * 4, float_bits(threshold(threadIdx.x)));
    if (threadIdx.x == THREADS - 1) touch_params(p, base + SharedMemory::NOWHERE);
    after_dependencies(p);
    u8* ways = shared + SharedMemory::WAYS;
    u32 found = Way::find(p, ways, (u32*)(shared + SharedMemory::SUMS));
    __syncthreads();
    auto ring_of = [&](int team) { return Ring{base + team * STAGES * STAGE_BYTES, barriers_of(team), 0, 0}; };
    auto unpacked_of = [&](int team) { return UnpackedRing{base + SharedMemory::UNPACKED_AT + team * UNPACKED_STAGES * UNPACKED_STAGE, unpacked_barriers_of(team), 0, 0}; };
    if (warp < 4) {
        give_up_registers<PRODUCER_REGISTERS>();
        int team = warp % TEAMS;
        const RowMaps* rows = nullptr;
#if ATTN_PAGE == 0
        rows = &maps;
#endif
        produce(p, rows, Way::of_team(ways, team, found), ring_of(team), unpacked_of(team), warp / TEAMS, lane);
        return;
    }
    take_registers<ATTENDER_REGISTERS>();
    int warpgroup = warp / 4 - 1, team = warpgroup / ROW_WARPS, thread = threadIdx.x % 128;
    float4* states = (float4*)(p.partial_o + p.row_states_at);
    Attender self = {{{p, ring_of(team), unpacked_of(team), base + SharedMemory::QUERIES + warpgroup * QUERY_BYTES, base + SharedMemory::THRESHOLDS,
                       base + SharedMemory::STATES + warpgroup * 64 * HEAD_DIM * 4 + thread * 16, states + (blockIdx.x * WARPGROUPS + warpgroup) * (HEAD_DIM / 8) * 128 + thread,
                       warpgroup, warp % 4, lane}}};
    // Teams whose rows are few have them in warps of different places: a place is a scheduler's.
    self.first_row = warpgroup % ROW_WARPS * WARPGROUP_ROWS + (self.warp + 4 - 2 * team) % 4 * (WARPGROUP_ROWS / 4);
    attend_all(self, Way::of_team(ways, team, found), team, (Arrival*)(shared + SharedMemory::ARRIVALS_AT + 16 * team));
}
