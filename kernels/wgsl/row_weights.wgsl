// row_weights.wgsl: of row r_$(n) the tile's maximum, and the lane's two weights as floats and as integers. Included by tile.wgsl and matrix_tile.wgsl.
#if INTEGER
let highest = from_order_key(top_$(n));
let tile_top = select(highest - 1.0, NONE, top_$(n) == 0u);
#else
let tile_top = select(from_order_key(top_$(n)), NONE, top_$(n) == 0u);
#end
#for j in 0..2
#if INTEGER
let p_$(j) = select(0.0, exp2w(min(highest - s_$(n)_$(j), 64.0)), seen_$(n)_$(j));
#else
let p_$(j) = select(0.0, exp2f(max(s_$(n)_$(j) - tile_top, -125.0)), seen_$(n)_$(j));
#end
#end
let units_0 = weight_units(p_0);
let units_1 = weight_units(p_1);
let sum = units_0 + units_1;
