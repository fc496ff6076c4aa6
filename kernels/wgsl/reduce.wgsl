// reduce.wgsl: maxima and sums over the lanes, by atomics in workgroup memory: whoever has some posts it to a slot, a barrier follows,
// and all read. Slots are cleared when they have been read. Subgroup operations were slower, and on one driver wrong (docs/wgpu.md).

// Of each row its largest score, and l.
#let TOP = 0
#let SUM = R
// Of V's group g: largest scale and shift, then of each row the weights and two parts of the shifts' term.
#let OF_GROUP = 2 + 3 * R
#let GROUPS_AT = 2 * R
// Of each row its largest query, and the sums of its planes for each of K's groups.
#let QUERY_TOP = GROUPS_AT + VG * OF_GROUP
#let QUERY_SUM = QUERY_TOP + R
// Of a page of channels: of each row the bound on its products with scales, and its shifts' term; the largest shift.
#let BOUND = QUERY_SUM + R * (K == GROUPS ? KG : 1)
#let SHIFT_SUM = BOUND + R
#let FAR = SHIFT_SUM + R
#let SLOTS = K == CHANNEL ? FAR + 1 : BOUND
var<workgroup> reduced: array<atomic<u32>, $(SLOTS)>;

fn clear(slot: u32) {
    atomicStore(&reduced[slot], 0u);
}

fn post_max(slot: u32, x: u32) {
    atomicMax(&reduced[slot], x);
}

fn post_sum(slot: u32, x: i32) {
    atomicAdd(&reduced[slot], bitcast<u32>(x));
}

fn posted(slot: u32) -> u32 {
    return atomicLoad(&reduced[slot]);
}

fn posted_sum(slot: u32) -> i32 {
    return bitcast<i32>(atomicLoad(&reduced[slot]));
}
