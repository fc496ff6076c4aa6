// query.wgsl: the query's planes (or floats), and the sums that the scores need, once. Included by both split kernels.
for (var pair = tid; pair < num_pairs; pair += $(T)u) {
    let x = query_unit(sequence, head, row0 + pair / $(UNITS)u, pair % $(UNITS)u);
#if INTEGER
    unit_max[pair] = largest(x);
#else
#for w in 0..4
    queries[pair * 4u + $(w)u] = x[$(w)];
#end
#end
}
#if INTEGER
workgroupBarrier();
#if K == CHANNEL
if tid < $(R)u {
    var a = 0.0;
    for (var u = 0u; u < $(UNITS)u; u++) {
        a = max(a, unit_max[tid * $(UNITS)u + u]);
    }
    row_amax[tid] = a;
}
#else
for (var pair = tid; pair < num_pairs; pair += $(T)u) {
    let r = pair / $(UNITS)u;
    var a = 0.0;
    for (var u = 0u; u < $(UNITS)u; u++) {
        a = max(a, unit_max[r * $(UNITS)u + u]);
    }
    let e = plane_exponent(a);
    let sum = store_plane(pair * 2u, query_unit(sequence, head, row0 + r, pair % $(UNITS)u), exp2i(e));
    if pair % $(UNITS)u == 0u {
        row_unit[r] = exp2i(-e);
    }
#if K == GROUPS || MATRIX
    unit_sum[pair] = sum;
#end
}
#if MATRIX
#include "matrix_query.wgsl"
#end
#if K == GROUPS || MATRIX
workgroupBarrier();
for (var at = tid; at < $(R * KG)u; at += $(T)u) {
    var sum = 0;
    for (var u = 0u; u < $(UNITS / KG)u; u++) {
        sum += unit_sum[at * $(UNITS / KG)u + u];
    }
    group_sum[at] = sum;
}
#end
#end
#end
