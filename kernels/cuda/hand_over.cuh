// States on their way in global memory (short.cu, ATTN_HAND_OVER): a team stores each of its slots, as soon as it has it, where
// whoever joins it looks. Nothing is counted, and no store waits for another: a word that is not zero is there. A zero is told as the
// smallest number instead, which arithmetic that flushes takes for the zero it was; who has read a word puts the zero back. (A count that
// all add to, looks at it, and loads behind those came one after the other: 1 µs more of 10.)
//
// Who joins waits for all CTAs of the item, who does not for nobody. CTAs start in the order of their indices, so a launch ends wherever
// one more than PARTS of them can run at once.
#pragma once
#include "slots.cuh"

DEVICE float told(float x) { return bits_float(max(float_bits(x), 1u)); }
DEVICE float2 told(float x, float y) { return make_float2(told(x), told(y)); }

// What the team with slots from `from` to `end` joins: of many slots, some of the parts; of few, the last team all.
DEVICE u32 handed_parts(const DecodeParams& p, const Item& item, int from, int end) {
    return item.num_slots >= SHARED_SLOTS ? parts_for(p, item, from, end) : end == item.num_slots && from < end ? ALL_PARTS : 0;
}
// Behind a barrier that its rows' (m, l) have been read.
DEVICE void clear_mls(const DecodeParams& p, const Item& item, u32 parts) {
    int rows = item.rows(p);
    float2* ml = p.state_ml + item.index(p) * p.max_slots * ROWS;
    for (int i = joiner(); i < item.num_slots * ROWS; i += JOINERS) {
        int row = i % ROWS;
        if (row < rows && parts >> row / PART_ROWS & 1) __stcg(ml + i, make_float2(0.0f, 0.0f));
    }
}
