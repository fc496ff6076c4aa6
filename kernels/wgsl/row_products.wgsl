// row_products.wgsl: w16 of the lane's two tokens in V's group $(g), and their terms of its shifts. Included by tile.wgsl and matrix_tile.wgsl.
#if V_SCALED
let w_0 = rhe(product(p_0, scale_$(g)_0));
let w_1 = rhe(product(p_1, scale_$(g)_1));
#else
let w_0 = rhe(p_0 * 16384.0);
let w_1 = rhe(p_1 * 16384.0);
#end
#if V == GROUPS
let p14_0 = (units_0 + 128) >> 8u;
let p14_1 = (units_1 + 128) >> 8u;
let z_hi = p14_0 * (shift_$(g)_0 >> 8u) + p14_1 * (shift_$(g)_1 >> 8u);
let z_lo = p14_0 * (shift_$(g)_0 & 255) + p14_1 * (shift_$(g)_1 & 255);
#end
