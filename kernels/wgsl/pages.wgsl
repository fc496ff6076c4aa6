// pages.wgsl: the bindings of the decode kernels, and where a page's bytes lie (FORMATS.md).
#include "decode_params"

// An item is a segment or a tile of a sequence: {sequence, its index there, kv_len, its tiles, its pages' place, tail page, 2 unused}; a
// sequence {first item, items, 6 unused}.
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tables: array<u32>;

#if READS_POOL && VIEW
#include "view.wgsl"
#else
#include "pool.wgsl"
#end
