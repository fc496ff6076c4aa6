// A warpgroup of many_rows.cu with query rows of floats (many_rows/float_rows.cuh).
#pragma once
#include "attend/many_rows/float_rows.cuh"
#include "attend/many_rows/warpgroup.cuh"

namespace attn {

struct FloatQueries : Warpgroup {
    static constexpr bool IS_BF16 = FloatRows::IS_BF16;
    float up[2];  // powers of two that queries are multiplied by
    bool has_low;  // whether they have second parts (`are_in_two_parts`), which are the same for the whole launch

    METHOD FloatRows float_rows() const { return {p, lane}; }
    // A row of the thread's, as it is.
    METHOD QueryRow unscaled_row(const WorkRange& range, int h) const { return float_rows().row(range, first_row + lane / 4 + 8 * h); }
    METHOD void set_lift(const WorkRange& range, int h, float lift) {
        up[h] = lift;
        rows.scale[h] = float_rows().scale_of(range, lift);
    }
    // Whether queries have second parts.
    METHOD bool are_in_two_parts() const { return Config::TWO_PARTS && !p.rounds_queries && (p.dtype == Dtype::F32 || (IS_BF16 && p.dtype == Dtype::F16)); }

    // Waits for the rows of the next work item, which a producer has loaded; false if there is none.
    METHOD bool take_rows(WorkRange& range) {
        barrier_wait(buffers.full(), buffers.phase);
        const LoadedRows& loaded = buffers.rows();
        if (loaded.is_end) return false;
        range = loaded.range;
        find_rows(range, loaded.queries);
        if (Config::WARPGROUPS == 2) has_low = are_in_two_parts();  // else many_rows.cu has found it
        queries = buffers.at();
#pragma unroll
        for (int h = 0; h < 2; h++) set_lift(range, h, loaded.lifts[16 * warp + lane / 4 + 8 * h]);
        return true;
    }
};

}  // namespace attn
