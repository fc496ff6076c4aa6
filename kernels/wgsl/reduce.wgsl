// reduce.wgsl: maxima and sums over the lanes, by atomics in workgroup memory: lanes post to a slot, a barrier follows, then all lanes read it.
// Slots are cleared after they have been read. Subgroup operations are slower, and wrong on one driver (docs/wgpu.md).

// For each row: its largest score, and its sum l.
#let ROW_MAX = 0
#let ROW_SUM = R
// For each group of V: the rows' largest weights times scales, and the sums of weights of one byte, of two rows in a slot.
#let LARGEST = 2 * R
#let PAIRS_OF_ROWS = (R + 1) / 2
#let WEIGHTS = LARGEST + (V_INTEGER ? VG * R : 0)
// For each row: the largest element of each of its parts, and the sums of its bytes for each of K's groups.
#let QUERY_MAX = WEIGHTS + (V_INTEGER ? VG * PAIRS_OF_ROWS : 0)
#let QUERY_SUM = QUERY_MAX + (K_INTEGER ? R * QUERY_PARTS : 0)
#let SLOTS = QUERY_SUM + (K_CENTRED ? R * KG : 0)
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
