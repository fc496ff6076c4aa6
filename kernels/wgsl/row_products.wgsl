// row_products.wgsl: w16 of the lane's token in V's group $(g), and its terms of the group's shifts. Included by tile.wgsl.
#if V_SCALED
let w = rhe(product(p, scale_$(g)));
#else
let w = rhe(p * 16384.0);
#end
#if V == GROUPS
let p14 = (units + 128) >> 8u;
let z_hi = p14 * (shift_$(g) >> 8u);
let z_lo = p14 * (shift_$(g) & 255);
#end
