// channel_arrays.wgsl: what a sealed page's channels make of the query (plane_channel.wgsl). Included by both split kernels.
var<workgroup> channel_scale: array<vec4<f32>, $(UNITS * 4)>;
var<workgroup> channel_shift: array<vec4<f32>, $(UNITS * 4)>;
var<workgroup> unit_shift: array<f32, $(UNITS)>;
var<workgroup> unit_sum: array<vec2<i32>, $(R * UNITS)>;             // sum of q15, of the shift term
var<workgroup> row_amax: array<f32, $(R)>;
var<workgroup> row_sum: array<i32, $(R)>;
var<workgroup> row_shift: array<f32, $(R)>;
