// reduce.wgsl: maxima and sums over the 32 lanes.
//
// Where a subgroup has 32 lanes they stay in registers; else each subgroup (or thread) posts its own to `reduced`,
// a barrier follows, and all read. Slots: maxima of scores, l; then per V group: f, h, weights, shift terms.

#if SG == 32
#let SLOTS = 0
fn lanes_max(x: u32) -> u32 {
    return subgroupMax(x);
}

fn lanes_sum(x: i32) -> i32 {
    return subgroupAdd(x);
}
#else
#let SLOTS = 2 * R + VG * (2 + 3 * R)
var<workgroup> reduced: array<atomic<u32>, $(SLOTS)>;

fn clear_reduced(lane: u32) {
    for (var i = lane; i < $(SLOTS)u; i += 32u) {
        atomicStore(&reduced[i], 0u);
    }
}

fn post_max(sg_lane: u32, slot: u32, x: u32) {
#if SG > 1
    let all = subgroupMax(x);
    if sg_lane == 0u {
        atomicMax(&reduced[slot], all);
    }
#else
    atomicMax(&reduced[slot], x);
#end
}

fn post_sum(sg_lane: u32, slot: u32, x: i32) {
#if SG > 1
    let all = subgroupAdd(x);
    if sg_lane == 0u {
        atomicAdd(&reduced[slot], bitcast<u32>(all));
    }
#else
    atomicAdd(&reduced[slot], bitcast<u32>(x));
#end
}

fn posted(slot: u32) -> u32 {
    return atomicLoad(&reduced[slot]);
}

fn posted_sum(slot: u32) -> i32 {
    return bitcast<i32>(atomicLoad(&reduced[slot]));
}
#end
