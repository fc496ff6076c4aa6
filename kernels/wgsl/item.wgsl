// item.wgsl: what a workgroup has to attend: its item, its rows, and the tiles that any of them sees. Included by decode_split.wgsl.
let item = workgroup.x + workgroup.z * params.grid_x;
if item >= params.num_splits {
    return;
}
let head = workgroup.y / params.row_blocks;
let row0 = (workgroup.y - head * params.row_blocks) * $(R)u;
let sequence = tables[params.splits_at + 8u * item];
let index = tables[params.splits_at + 8u * item + 1u];
let kv_len = tables[params.splits_at + 8u * item + 2u];
let item_tiles = tables[params.splits_at + 8u * item + 3u];
let pages_at = tables[params.splits_at + 8u * item + 4u];
let tail_page = tables[params.splits_at + 8u * item + 5u];
let rows = params.heads_per_kv * params.q_len;
let last = kv_len - 1u;
let num_rows = min($(R)u, rows - row0);
let num_pairs = num_rows * $(UNITS)u;

// What each row sees.
if lane < $(R)u {
    let row = row0 + lane;
    let position = i32(kv_len) - i32(params.q_len) + i32(row / params.heads_per_kv);
    var end = i32(kv_len);
    if params.causal != 0u {
        end = clamp(position + 1, 0, i32(kv_len));
    }
    var first = 0;
    if params.window_left >= 0 {
        first = clamp(position - params.window_left, 0, end);
    }
    row_sees[lane] = vec2<u32>(u32(first), select(0u, u32(end - first), row < rows));
#if ALIBI
    let h = head * params.heads_per_kv + min(row, rows - 1u) % params.heads_per_kv;
    row_slope[lane] = bitcast<f32>(tables[params.scales_at + 2u * params.num_kv_heads + h]);
#end
}
// The tiles of the item that any of them sees.
let num_tiles = (kv_len + 63u) / 64u;
var tile = index * item_tiles;
var tile_end = min((index + 1u) * item_tiles, num_tiles);
{
    let last_row = min(row0 + $(R)u, rows) - 1u;
    let base = i32(kv_len) - i32(params.q_len);
    if params.causal != 0u {
        let seen_end = clamp(base + i32(last_row / params.heads_per_kv) + 1, 0, i32(kv_len));
        tile_end = min(tile_end, u32(seen_end + 63) / 64u);
    }
    if params.window_left >= 0 {
        tile = max(tile, u32(max(base + i32(row0 / params.heads_per_kv) - params.window_left, 0)) / 64u);
    }
}
