// reduce.wgsl: maxima and sums over the lanes, by atomics in workgroup memory: lanes post to a slot, a barrier follows, then all lanes read it.
// Slots are cleared after they have been read. Subgroup operations are slower, and wrong on one driver (docs/wgpu.md).

// For each row: its largest score, and its sum l.
#let ROW_MAX = 0
#let ROW_SUM = R
// For V's group g: the largest scale and shift; then for each row the sum of weights and two parts of the shifts' term.
#let OF_GROUP = 2 + 3 * R
#let GROUPS_AT = 2 * R
// For each row: its largest query, and the sums of its planes for each of K's groups.
#let QUERY_MAX = GROUPS_AT + VG * OF_GROUP
#let QUERY_SUM = QUERY_MAX + R
// For a sealed Int4 Channel page: the bound of each row's products with scales, each row's shift term, and the largest shift.
#let BOUND = QUERY_SUM + R * (K == GROUPS ? KG : 1)
#let SHIFT_SUM = BOUND + R
#let LARGEST_SHIFT = SHIFT_SUM + R
#let SLOTS = K == CHANNEL ? LARGEST_SHIFT + 1 : BOUND
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
