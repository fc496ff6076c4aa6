// matrix_query.wgsl: the planes of q, from `stage` into registers. Included by decode_split.wgsl or tile.wgsl.
workgroupBarrier();
#for u in 0..UNITS
let query_$(u) = coopLoadT<coop_mat16x16<f16, A>>(&stage[$(4 * u)], $(A_STRIDE)u);
#end
