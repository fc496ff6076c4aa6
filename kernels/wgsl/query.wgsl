// query.wgsl: the query's planes (or floats), and the sums that the scores need, once. Included by decode_split.wgsl.
for (var slot = lane; slot < $(SLOTS)u; slot += $(T)u) {
    clear(slot);
}
workgroupBarrier();
#for n in 0..PAIRS
let pair_$(n) = lane + $(n * T)u;
let row_$(n) = pair_$(n) / $(UNITS)u;
let unit_$(n) = pair_$(n) % $(UNITS)u;
var query_$(n): array<vec4<f32>, 4>;
if pair_$(n) < num_pairs {
    query_$(n) = query_unit(sequence, head, row0 + row_$(n), unit_$(n));
#if INTEGER
    post_max($(QUERY_TOP)u + row_$(n), bitcast<u32>(largest(query_$(n))));
#else
#for w in 0..4
    queries[pair_$(n) * 4u + $(w)u] = query_$(n)[$(w)];
#end
#end
}
#end
workgroupBarrier();
#if INTEGER && K != CHANNEL
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    let e = plane_exponent(bitcast<f32>(posted($(QUERY_TOP)u + row_$(n))));
    let sum = store_plane(pair_$(n) * 2u, query_$(n), exp2i(e));
    if unit_$(n) == 0u {
        row_unit[row_$(n)] = exp2i(-e);
    }
#if K == GROUPS
    post_sum($(QUERY_SUM)u + row_$(n) * $(KG)u + unit_$(n) / $(UNITS / KG)u, sum);
#end
}
#end
workgroupBarrier();
#end
