// matrix_values.wgsl: both planes' sums of 64 dims, into `sums`. Included by fold.wgsl.
#let BLOCKS = D - 64 * C < 64 ? (D - 64 * C) / 16 : 4
#for b in 0..BLOCKS
var value_$(C)_$(b): coop_mat16x16<f32, C>;
#end
#for t in 0..4
workgroupBarrier();
#for i in 0..DPL
#for w in 0..4
stage[(dim_of(lane, $(C * DPL + i)u) - $(64 * C)u) * $(B_STRIDE)u + $(w)u] = halves(v_$(t)_$(i)[$(w)]);
#end
#end
workgroupBarrier();
#for b in 0..BLOCKS
{
    let codes = coopLoad<coop_mat16x16<f16, B>>(&stage[$(16 * B_STRIDE * b)], $(B_STRIDE)u);
    value_$(C)_$(b) = coopMultiplyAdd(weights_$(t), codes, value_$(C)_$(b));
}
#end
#end
#for b in 0..BLOCKS
coopStoreT(value_$(C)_$(b), &sums[$(16 * b)], 64u);
#end
workgroupBarrier();
