// matrix_query.wgsl: the planes of q, from `stage` into registers of every subgroup. Included by query.wgsl or matrix_tile.wgsl.
workgroupBarrier();
#if PLAIN
for (var at = tid; at < $(16 * A_STRIDE)u; at += 128u) {
    planes[at] = stage[at];
}
#else
#for u in 0..UNITS
let query_$(u) = coopLoadT<coop_mat16x16<f16, A>>(&stage[$(4 * u)], $(A_STRIDE)u);
#end
#end
