// row_weights.wgsl: of row $(r) the lane's weight as a float and as an integer. Included by tile.wgsl.
let highest = from_order_key(posted($(TOP + r)u));
#if INTEGER
let p = select(0.0, exp2w(min(highest - s_$(r), 64.0)), s_$(r) > NONE);
#else
let p = select(0.0, exp2f(max(s_$(r) - highest, -125.0)), s_$(r) > NONE);
#end
let units = weight_units(p);
