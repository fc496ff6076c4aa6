// many_rows.cu: attention of 9 and more query rows to each KV head, up to whole prompts, with products of a warpgroup (sm_90a).
//
// Grid      persistent, a CTA to each SM; one or two warpgroups of producers and two that attend 64 rows each: one team for 128 rows, or two of 64, or, of 16-bit floats and up
//           to 128 dims, three of a team for 192; integers of few rows have two of 32 (many_rows/warpgroup.cuh), wide rows one whose warpgroups share 64 (many_rows/wide_integers.cuh, many_rows/wide_floats.cuh).
// Split     work items, (query block, KV head): where there are enough to balance, teams take whole ones from a queue, else ranges of spans
//           (many_rows/work.cuh).
// Pipeline  each team has a ring of stages, which its producer warp fills (pipeline.cuh). Products read keys and values from there; codes of 4 bits
//           are turned into bytes first, and those of fp8 into f16, by the warps of the producers, in a ring of their own; latents of fp8 on their way from pages.
// Rows      where work items are whole, floats' are loaded by producers' warps, an item ahead (many_rows/row_loader.cuh).
// Merge     a segment's state is in registers, a span's in shared memory, the row's in the workspace: each thread has its own elements. Floats have no
//           segments or spans: a team's tiles of a work item are summed in registers. A work item that several teams share is merged in the workspace
//           (many_rows/shared_items.cuh).
// Reads     q; pages; page table, lengths.
// Writes    out, lse; states, partials and arrival counts in the workspace.
// Numerics  docs/arithmetic.md for integers, many_rows/floats.cuh for floats. The order of every rounding of integers is the same on every grid.
// Shared    many_rows/shared_memory.cuh.
// Host      kernels/src/cuda: select.rs (configuration), launch.rs, smem.rs; attn-cuda/src/native/launch_plan.rs.
#include "attend/many_rows/attender.cuh"
#include "attend/many_rows/row_loader.cuh"
#include "attend/many_rows/shared_items.cuh"
#include "attend/many_rows/wide_attender.cuh"

namespace attn {

static_assert(INTEGER || Keys::SCHEME == Values::SCHEME, "select.rs");
static_assert((PAGE != 0 || !INTEGER) && (LATENTS || Keys::GROUPS == 1) && Values::GROUPS == 1, "select.rs");
static_assert(Config::IS_WIDE || K_DIM == V_DIM || (Config::PRODUCTS_READ_STAGES && PAGE != 0 && K_DIM > V_DIM), "select.rs: else rows take one for the other");
static_assert(Config::IS_WIDE || (Config::PRODUCTS_READ_STAGES && !INTEGER ? K_DIM % 16 == 0 && K_DIM <= 256 : K_DIM % 32 == 0 && K_DIM <= 128), "select.rs");

// Of each thread. Turning codes into f16 takes more registers than attending floats leaves unused; those that attend have what is left.
constexpr int START_REGISTERS = 65536 / Config::THREADS / 8 * 8;
constexpr bool WIDENS = Config::UNPACKS && !INTEGER && !Config::IS_WIDE;
constexpr int PRODUCER_REGISTERS = Config::WIDENS_PAGES                     ? 88
                                   : WIDENS                                 ? (Config::PRODUCERS > 1 ? 80 : 104)
                                   : Config::UNPACKS || Config::LOADS_AHEAD ? 56
                                   : Config::WARPGROUPS > 2                 ? 32
                                                                            : 40;
constexpr int ATTENDER_REGISTERS = ((Config::PRODUCERS + Config::WARPGROUPS) * START_REGISTERS - Config::PRODUCERS * PRODUCER_REGISTERS) / Config::WARPGROUPS / 8 * 8;

template <bool IS_WIDE_INTEGER> struct AttenderOf {
    using Type = RowAttender;
};
template <> struct AttenderOf<true> {
    using Type = WideAttender;
};
using Attender = AttenderOf<INTEGER && Config::IS_WIDE>::Type;

// Attends whole work items, and reserves the team's next ones.
template <class Attender, class Items> DEVICE void attend_items(Attender& self, Items& scheduler, int team) {
    WorkRange range;
    if constexpr (Config::LOADS_AHEAD) {
#pragma unroll 1
        while (self.take_rows(range)) self.attend(range);
    } else {
        bool reserves = self.warpgroup % Config::TEAM_WARPGROUPS == 0 && self.warp == 0 && self.lane == 0;
        if (reserves) scheduler.publish(blockIdx.x * Config::TEAMS + team);
#pragma unroll 1
        while (scheduler.next(self.p, range, self.lane)) {
            u32 item = reserves ? scheduler.reserve(self.p) : 0;  // the atomic returns while rows are loaded
            self.load_rows(range);
            if (reserves) scheduler.publish(item);
            self.attend(range);
        }
    }
}
// Attends a range of spans, and merges work items that several teams share.
template <class Ranges> DEVICE void attend_ranges(Attender& self, Ranges& scheduler, const SharedItemMerge& shared) {
    MergeClaims claims = {};
    WorkRange range;
#pragma unroll 1
    while (scheduler.next(self.p, range, self.lane)) {
        self.load_rows(range);
        if (self.attend(range)) shared.count(range, claims);
    }
    shared.finish(claims);
}
DEVICE void attend_all(Attender& self, Scheduler scheduler, int team, Arrival* arrival) {
    if constexpr (Config::WHOLE_ITEMS) attend_items(self, scheduler, team);
    else attend_ranges(self, scheduler, SharedItemMerge{self.p, arrival, TEAM_BARRIER + team});
}

// Blocks of three warpgroups, which are many, have a copy of all that for queries with second parts, whose registers then cost others nothing: a branch further in makes these
// 5 % slower. Where work is short, a second copy costs more than it gains, even unused: instructions are fetched as they come.
template <class Attender> DEVICE void attend_by_parts(Attender& self, const Scheduler& scheduler, int team, Arrival* arrival) {
    if constexpr (Config::TWO_PARTS && Config::WARPGROUPS > 2) {
        if (self.are_in_two_parts()) {
            self.has_low = true;
            attend_all(self, scheduler, team, arrival);
            return;
        }
        self.has_low = false;
    }
    attend_all(self, scheduler, team, arrival);
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) attn_decode(const __grid_constant__ DecodeParams p ATTN_ROW_MAPS) {
    SHARED_MEMORY(shared, Stage::ALIGN);
    int warp = warp_id(), lane = lane_id();
    u32 base = shared_address(shared);
    constexpr int TEAMS = Config::TEAMS, STAGES = Config::STAGES, UNPACKED_STAGES = Config::UNPACKED_STAGES;
    auto barriers_of = [&](int team) { return base + SharedMemory::BARRIERS + team * STAGES * 16; };
    if (threadIdx.x < TEAMS * STAGES) Ring::init(barriers_of(threadIdx.x / STAGES), threadIdx.x % STAGES);
    auto unpacked_barriers_of = [&](int team) { return base + SharedMemory::BARRIERS + TEAMS * STAGES * 16 + team * UNPACKED_STAGES * 16; };
    if (Config::UNPACKS && threadIdx.x < TEAMS * UNPACKED_STAGES)
        UnpackedRing::init(unpacked_barriers_of(threadIdx.x / larger(UNPACKED_STAGES, 1)), threadIdx.x % larger(UNPACKED_STAGES, 1));
    if (Config::TURNERS > 0 && threadIdx.x < STAGES) {
        barrier_init(base + SharedMemory::COPIED + threadIdx.x * 8, 1);
        barrier_init_fence();
    }
    if (Config::LOADS_AHEAD && threadIdx.x < Config::WARPGROUPS) RowBuffers::of_warpgroup(shared, threadIdx.x).init();
    if (INTEGER && threadIdx.x < TILE) sts32(base + SharedMemory::THRESHOLDS + threadIdx.x * 4, float_bits(threshold(threadIdx.x)));
    if (threadIdx.x == Config::THREADS - 1) touch_params(p, base + SharedMemory::NOWHERE);
    after_dependencies(p);
    u8* schedulers = shared + SharedMemory::SCHEDULERS;
    u32 found = Scheduler::find(p, schedulers, (u32*)(shared + SharedMemory::SUMS));
    __syncthreads();
    auto ring_of = [&](int team) { return Ring{base + team * STAGES * Stage::BYTES, barriers_of(team), 0, 0}; };
    auto unpacked_of = [&](int team) {
        return UnpackedRing{base + SharedMemory::UNPACKED_AT + team * UNPACKED_STAGES * Config::UNPACKED_BYTES, unpacked_barriers_of(team), 0, 0};
    };
    if (warp < 4 * Config::PRODUCERS) {
        give_up_registers<PRODUCER_REGISTERS>();
        int team = warp % TEAMS, producer = warp / TEAMS;
        Scheduler scheduler = Scheduler::of_team(schedulers, team, found);
        if (Config::LOADS_AHEAD && producer > 0) {
            load_rows_ahead(p, scheduler, shared, team, producer, lane);
        } else {
            const RowMaps* rows = ATTN_ROW_MAPS_OR_NULL;
            produce(p, rows, scheduler, ring_of(team), unpacked_of(team), producer, lane);
        }
        wait_for_dependencies();  // a launch that waits for this one relies on those before it, too
        return;
    }
    take_registers<ATTENDER_REGISTERS>();
    int warpgroup = warp / 4 - Config::PRODUCERS, team = warpgroup / Config::TEAM_WARPGROUPS, thread = threadIdx.x % 128;
    float4* states = (float4*)(p.partial_o + p.row_states_at);
    Attender self = {{{p, ring_of(team), unpacked_of(team), RowBuffers::of_warpgroup(shared, warpgroup), base + SharedMemory::QUERIES + warpgroup % ROW_SETS * QUERY_BYTES,
                       base + SharedMemory::THRESHOLDS, base + SharedMemory::SCALES + (warp - 4 * Config::PRODUCERS) * TILE * 4,
                       base + SharedMemory::STATES + (Config::IS_WIDE ? 0 : warpgroup * 64 * V_DIM * 4 + thread * 16),
                       states + (blockIdx.x * Config::WARPGROUPS * (V_DIM / 8) + warpgroup * (WARPGROUP_DIMS / 8)) * 128 + thread, warpgroup, warp % 4, lane}}};
    self.first_row = first_row_of(warpgroup, self.warp);
    attend_by_parts(self, Scheduler::of_team(schedulers, team, found), team, (Arrival*)(shared + SharedMemory::ARRIVALS_AT + 16 * team));
}

}  // namespace attn
