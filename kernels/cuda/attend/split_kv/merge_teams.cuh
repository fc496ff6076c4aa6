// Sections 5 and 6 of docs/arithmetic.md between the teams of a CTA of split_kv.cu: team states are merged into the state of the work
// unit, units into the work item's, by all threads of the CTA.
//
// Global memory is avoided: a CTA that has a work item's first units keeps their merged state in shared memory, and writes the result if
// it reaches the work item's end (storing every unit's state took 20 µs of 270 at batch 512). Work items that several CTAs share go
// through partials in the workspace (partials_counted.cuh). A unit's arrival is counted one segment into the next unit, when its writes
// have landed, and the outcome is used when that unit ends.
#pragma once
#include "attend/partials_counted.cuh"
#include "attend/split_kv/work.cuh"
#include "attend/tile/value.cuh"

namespace attn {

// State of the merge that all threads of the CTA use; in shared memory, because registers are short.
struct MergeState {
    Arrival arrival;  // outcome of counting `counted`
    u64 add;          // increment of the arrival count of `counted`
    int covered;    // partials of the current work item whose merged state is kept; 0: none
    int began;      // this CTA's first partial of the current work item
    WorkItem counted;   // work item to count
};

struct Merge {
    static constexpr int LANES = Config::THREADS / Config::ROWS;
    enum CountStep { NOTHING, TO_COUNT, COUNTED };

    u8* shared;
    MergeState* shared_state;
    CountStep count_step;
    u64 before;  // thread 0: the count before the increment

    METHOD void start(u8* memory) {
        shared = memory;
        shared_state = (MergeState*)(shared + SharedMemory::MERGE_STATE);
        if (threadIdx.x == 0) {
            shared_state->arrival.last = 0;
            shared_state->covered = 0;
        }
        count_step = NOTHING;
    }
    METHOD void count(const DecodeParams& p) {
        if (count_step != TO_COUNT) return;
        if (threadIdx.x == 0) before = count_release(p.counters + shared_state->counted.index(p), shared_state->add);
        count_step = COUNTED;
    }
    // Before a barrier that `on_last_arrival` follows.
    METHOD void resolve_arrival(const DecodeParams& p) {
        if (count_step == COUNTED && threadIdx.x == 0) shared_state->arrival = on_arrival(p, shared_state->counted, before, shared_state->add);
    }
    METHOD void on_last_arrival(const DecodeParams& p) {
        if (count_step != COUNTED) return;
        count_step = NOTHING;
        if (shared_state->arrival.last == 0) return;
        merge_arrived(p, shared_state->counted, {shared_address(shared + SharedMemory::ROTATED_ROW), 1}, shared_state->arrival);
        __syncthreads();
    }

    // Takes a team's state at the end of a segment: the first of a unit is stored where the merge reads it, later ones are merged there.
    METHOD void segment(const State& state, bool first, int team, int warp_row, int lane) {
        float* states = (float*)(shared + SharedMemory::STATES);
        float2* ml = (float2*)(shared + SharedMemory::MAX_SUMS);
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            int row = team * Config::ROWS + warp_row + g * 8 + 2 * (lane % 4);
            Factors w[2];
            float2 x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                x[e] = make_float2(state.m[g][e], state.l[g][e]);
                if (first) continue;
                float2 before = ml[row + e];
                w[e] = merge_sums(before.x, before.y, x[e], false);
                x[e] = before;
            }
            if (!first) __syncwarp();
            if (lane < 4) ml[row] = x[0], ml[row + 1] = x[1];
#pragma unroll
            for (int j = 0; j < V_DIM / 16; j++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float& to = states[(row + n % 2) * Config::STATE_STRIDE + 16 * j + dim_of(n / 2, lane)];
                    float o = state.o[g][j % (Team::DIMS / 16)][n];
                    to = first ? o : to * w[n % 2].alpha + o * w[n % 2].beta;
                }
        }
    }

    // Writes the result of a work item that a team had alone: a warp's rows are its own, four threads to a row.
    METHOD void item(const DecodeParams& p, const Work& work, int team, int warp_row, int lane) const {
        __syncwarp();
        WorkItem item = {work.b, work.kv_head(team), work.row_block, 0};
        if (item.kv_head < p.num_kv_heads) {
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) {
                int row = warp_row + g * 8 + lane / 4;
                Epilogue epilogue = Epilogue::at(p, item, row);
                float2 ml = ((const float2*)(shared + SharedMemory::MAX_SUMS))[team * Config::ROWS + row];
                epilogue.begin(ml.x, ml.y, lane % 4 == 0);
                const float4* state = (const float4*)((const float*)(shared + SharedMemory::STATES) + (team * Config::ROWS + row) * Config::STATE_STRIDE);
                epilogue.write_state<4>(shared_address(state), lane % 4);
            }
        }
        __syncthreads();
    }

    // Merges the states of all teams at the end of a unit.
    METHOD void unit(const DecodeParams& p, const Cursor& here, const Cursor& next) {
        resolve_arrival(p);
        __syncthreads();
        if constexpr (!SharedMemory::ROTATES_IN_STATES) on_last_arrival(p);
        const Work& work = here.work;
        TeamGranularity takes = work.takes();
        int covered = shared_state->covered, partial = work.partial, end = partial + work.partials_here;
        bool first = partial == 0, last = end == work.num_partials;
        // Units of tiles, which merge at two levels, and row blocks that take turns become partials.
        bool keeps = !Config::LEAVES_SPANS && (first ? last || (takes != A_TILE && p.row_blocks == 1) : covered > 0);
        Unit u = {{work.b, work.heads, work.row_block, work.num_partials, takes == A_TILE ? SEGMENT_STATES : SPAN_STATES},
                  partial,
                  end,
                  first,
                  keeps,
                  keeps && last,
                  !keeps || (!last && (!next.is_valid(p) || next.is_fresh)),
                  takes};
        if (u.takes == A_SPAN && !keeps) publish_spans(p, u);
        else merge_teams(p, u);
        if constexpr (Config::LEAVES_SPANS) {
            if (last) clear_spans(p, u.item);
            __syncthreads();
            return;
        }
        __syncthreads();
        if constexpr (SharedMemory::ROTATES_IN_STATES) on_last_arrival(p);
        if (threadIdx.x == 0) {
            int began = here.is_fresh ? partial : shared_state->began;
            shared_state->began = began;
            shared_state->covered = keeps && !last && !u.leaves ? u.end : 0;
            if (u.leaves) {
                shared_state->counted = u.item;
                int from = keeps ? 0 : u.partial;
                shared_state->add = ArrivalCount::of(u.end - from, keeps ? u.end - 1 : 0, next.is_valid(p) ? 0 : slices_for(p, u.item, began, u.end));
            }
        }
        if (u.leaves) count_step = TO_COUNT;
    }
    // No row sees a token of the spans behind a sequence's end, up to the longest's.
    METHOD void clear_spans(const DecodeParams& p, const WorkItem& item) const {
        for (int i = threadIdx.x; i < (p.max_partials - item.num_partials) * Config::ROWS; i += Config::THREADS) {
            long long place = partial_place(p, item, item.num_partials + i / Config::ROWS, i % Config::ROWS);
            if (place >= 0) __stcg(p.partial_max_sum + place, make_float2(MINUS_INFINITY, 0.0f));
        }
    }
    struct Unit {
        WorkItem item;
        int partial, end;            // partials of the unit
        bool first, keeps, ends;  // first of the work item; merged with the units before; ends with the result
        bool leaves;              // becomes a partial: the CTA's part of the work item ends here, or the unit is alone
        TeamGranularity takes;
    };
    // A row and the threads that share it: twice as many where half of the rows only fill up the tile.
    struct Lanes {
        int row, lane, lanes;
        DEVICE Lanes of(const DecodeParams& p) {
            bool twice = 2 * LANES <= 32 && 2 * p.heads_per_kv * p.q_len <= Config::ROWS;
            int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
            if (!twice) return {row, lane, LANES};
            return {row / 2, lane + row % 2 * LANES, 2 * LANES};
        }
    };
    // Merges the teams' states of a unit, then with what is kept; spans are merged with it one by one.
    METHOD void merge_teams(const DecodeParams& p, const Unit& u) {
        auto [row, at, lanes] = Lanes::of(p);
        const float4* states = (const float4*)((const float*)(shared + SharedMemory::STATES) + row * Config::STATE_STRIDE);
        const float2* ml = (const float2*)(shared + SharedMemory::MAX_SUMS) + row;
        float4* kept = (float4*)(shared + SharedMemory::KEPT) + row * ROW_VECTORS;
        float2* kept_ml = (float2*)(shared + SharedMemory::KEPT_MAX_SUMS) + row;
        bool merges = u.keeps && !u.first, one_by_one = u.takes == A_SPAN, is_fold = u.takes == A_TILE;
        // w[0] is for what is kept: before the teams' states, or after them.
        float2 sum = one_by_one && merges ? *kept_ml : ml[0];
        Factors w[1 + Config::TEAMS];
        if (one_by_one && merges) w[0] = merge_sums(sum.x, sum.y, ml[0], false);
#pragma unroll
        for (int team = 1; team < Config::TEAMS; team++) w[team] = merge_sums(sum.x, sum.y, ml[team * Config::ROWS], is_fold);
        if (!one_by_one && merges) {
            float2 before = *kept_ml;
            w[0] = merge_sums(before.x, before.y, sum, false);
            sum = before;
        }
        __syncwarp();  // a row's threads, all of one warp, have read what its first one overwrites
        if (at == 0) *kept_ml = sum;
        Epilogue epilogue = {};
        if (u.ends) {
            epilogue = Epilogue::at(p, u.item, row);
            epilogue.begin(sum.x, sum.y, at == 0);
        }
        long long place = partial_place(p, u.item, u.end - 1, row);
        bool leaves = u.leaves && (!Config::LEAVES_SPANS || place >= 0);
        if (leaves && at == 0) __stcg(p.partial_max_sum + place, sum);
        float4* to = (float4*)p.partial_o + place * ROW_VECTORS;
#pragma unroll 1  // for a launch of one unit, instructions take longer to arrive than to run
        for (int vector = at; vector < ROW_VECTORS; vector += lanes) {
            float4 x = states[vector], o;
            if (merges) o = kept[vector];
            if (one_by_one && merges) {
                merge(o, x, w[0], false);
                x = o;
            }
#pragma unroll
            for (int team = 1; team < Config::TEAMS; team++) merge(x, states[team * Config::ROWS * (Config::STATE_STRIDE / 4) + vector], w[team], is_fold);
            if (!one_by_one && merges) {
                merge(o, x, w[0], false);
                x = o;
            }
            if (u.ends && !Values::IS_ROTATED) epilogue.write(vector, x);
            else if (leaves) __stcg(to + vector, x);
            else kept[vector] = x;
        }
        if (Values::IS_ROTATED && u.ends) {
            constexpr int TWICE = LANES < 32 ? 2 * LANES : LANES;
            __syncwarp();
            if (lanes == LANES) epilogue.write_state<LANES>(shared_address(kept), at);
            else epilogue.write_state<TWICE>(shared_address(kept), at);
        }
    }
    // Stores each team's span as a partial.
    METHOD void publish_spans(const DecodeParams& p, const Unit& u) {
        auto [row, lane, lanes] = Lanes::of(p);
        const float* states = (const float*)(shared + SharedMemory::STATES) + row * Config::STATE_STRIDE;
#pragma unroll 1
        for (int team = 0; team < u.end - u.partial; team++) {
            long long place = partial_place(p, u.item, u.partial + team, row);
            if (Config::LEAVES_SPANS && place < 0) continue;
            const float4* from = (const float4*)(states + team * Config::ROWS * Config::STATE_STRIDE);
            float4* to = (float4*)p.partial_o + place * ROW_VECTORS;
            for (int at = lane; at < ROW_VECTORS; at += lanes) __stcg(to + at, from[at]);
            if (lane == 0) __stcg(p.partial_max_sum + place, ((const float2*)(shared + SharedMemory::MAX_SUMS))[team * Config::ROWS + row]);
        }
    }
    METHOD void finish(const DecodeParams& p) {
        if (count_step == NOTHING) return;
        count(p);
        resolve_arrival(p);
        __syncthreads();
        on_last_arrival(p);
    }
};

}  // namespace attn
