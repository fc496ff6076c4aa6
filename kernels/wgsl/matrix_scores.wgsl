// matrix_scores.wgsl: both planes' sums of 64 tokens, into `sums`. Included by tile.wgsl.
#for b in 0..4
var score_$(b): coop_mat16x16<f32, C>;
#end
#for u in 0..UNITS
workgroupBarrier();
#for j in 0..2
#for w in 0..4
stage[(mine + $(8 * j)u) * $(B_STRIDE)u + $(w)u] = halves(k_$(u)_$(j)[$(w)]);
#end
#end
workgroupBarrier();
#for b in 0..4
{
    let codes = coopLoad<coop_mat16x16<f16, B>>(&stage[$(16 * B_STRIDE * b)], $(B_STRIDE)u);
    score_$(b) = coopMultiplyAdd(query_$(u), codes, score_$(b));
}
#end
#end
#for b in 0..4
coopStoreT(score_$(b), &sums[$(16 * b)], 64u);
#end
workgroupBarrier();
