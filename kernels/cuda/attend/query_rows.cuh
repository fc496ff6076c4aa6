// Query rows: where they lie, which tokens they see, and their elements, four lanes to a row (sections 2 and 3 of docs/arithmetic.md).
#pragma once
#include "attend/query_blocks.cuh"
#include "page/rotation.cuh"
#include "common/arithmetic.cuh"
#include "common/dtype.cuh"

namespace attn {

// A row of Q and the factor that turns it into q' of section 3. Rows that only pad the MMA load the work item's first row and have factor
// 0: without a branch, all loads of a row are in flight together.
struct QueryRow {
    const u8* row;
    float factor;
    int dtype;

    // Elements dim to dim + 3 of q' (dim a multiple of four). NARROW: the row is 16-bit; the caller branches once per row.
    template <bool NARROW> METHOD void four(int dim, float (&x)[4]) const {
        if (NARROW) {
            uint2 v = *(const uint2*)(row + dim * 2);
            set(widen_pair(v.x, dtype), widen_pair(v.y, dtype), x);
        } else {
            float4 v = *(const float4*)(row + dim * 4);
            set(make_float2(v.x, v.y), make_float2(v.z, v.w), x);
        }
    }
    // Elements dim, dim + 1, dim + 8, dim + 9 of q' (dim even).
    template <bool NARROW> METHOD void pairs(int dim, float (&x)[4]) const { set(pair<NARROW>(dim), pair<NARROW>(dim + 8), x); }
    template <bool NARROW> METHOD float2 pair(int dim) const {
        return NARROW ? widen_pair(*(const u32*)(row + dim * 2), dtype) : *(const float2*)(row + dim * 4);
    }
    METHOD void set(float2 a, float2 b, float (&x)[4]) const {
        x[0] = a.x * factor;
        x[1] = a.y * factor;
        x[2] = b.x * factor;
        x[3] = b.y * factor;
    }
};
// Row number `row` of the work item's row block.
template <class Item> DEVICE QueryRow query_row(const DecodeParams& p, const Item& item, int kv_head, int row) {
    int r = item.row_block * Config::ROWS + row;
    QueryBlock queries = query_block(p, item.b);
    bool real = r < p.heads_per_kv * queries.tokens;
    r = real ? r : 0;
    int i = (u32)r / p.heads_per_kv_divmod, head = (kv_head - i) * p.heads_per_kv + r;
    float factor = p.log2_scale * (p.k_tensor_scales ? p.k_tensor_scales[kv_head] : 1.0f);
    return {row_at(p.q, (u64)(queries.first + i) * p.num_q_heads + head, K_DIM, p.dtype), real ? factor : 0.0f, p.dtype};
}

// Whether scores pass through a soft cap or slopes: they are multiplied by their row's step before, else on their way to the grid.
DEVICE bool changes_scores(const DecodeParams& p) { return HAS_SCORE_MODS && (p.softcap_inner != 0.0f || p.alibi_slopes); }

// The tokens that a query row sees, and what their scores depend on.
struct SeenTokens {
    int start, end;
    int position;  // of the row's query token
    int tile;      // from which its window of residuals counts
    float slope;   // of ALiBi
};
// Of row number `row` of a query block and KV head; `first`: the position of the block's first token. Rows that only fill up the MMA see everything, so
// that they never make a full tile look masked.
DEVICE SeenTokens seen_tokens(const DecodeParams& p, const QueryBlock& queries, int kv_head, int kv_len, int first, int row) {
    SeenTokens seen;
    bool real = row < p.heads_per_kv * queries.tokens;
    int i = (u32)row / p.heads_per_kv_divmod, position = first + i;
    seen.end = !real ? 0x7fffffff : p.causal ? min(max(position + 1, 0), kv_len) : kv_len;
    seen.start = 0;
    if (HAS_SCORE_MODS && real) {
        int first = p.window_left < 0 ? 0 : position - p.window_left;
        if (p.chunk) first = max(first, position - position % p.chunk);
        seen.start = min(max(first, 0), seen.end);
    }
    seen.slope = HAS_SCORE_MODS && real && p.alibi_slopes ? p.alibi_slopes[(kv_head - i) * p.heads_per_kv + row] : 0.0f;
    seen.position = position;
    seen.tile = !real ? 0x7fffffff : max(p.causal ? position : last_position(p, queries, kv_len), 0) / TILE;
    return seen;
}

// Splits two floats into 16-bit floats with x ≈ hi + lo, and packs both hi and both lo.
template <bool IS_BF16> DEVICE void split_pair(float x, float y, u32& hi, u32& lo) {
    if constexpr (IS_BF16) {
        hi = bf16_pair(x, y);
        lo = bf16_pair(x - bits_float(hi << 16), y - bits_float(hi & 0xffff0000));
    } else {
        hi = f16_pair(x, y);
        lo = f16_pair(x - half_float(hi & 0xffff), y - half_float(hi >> 16));
    }
}

// A bool as a type, so that a generic lambda can take it at compile time.
template <bool IS> struct Is {
    static constexpr bool value = IS;
};

// Over the four lanes that share a row.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
// Of numbers of which some are positive; their shuffles do not wait for each other.
DEVICE float quad_max_of_positive(float x) {
    float other[3];
#pragma unroll
    for (int i = 0; i < 3; i++) other[i] = __shfl_xor_sync(~0u, x, i + 1);
    return largest_of_positive(largest_of_positive(x, other[0], other[1]), other[2], other[2]);
}
template <class T> DEVICE T quad_sum(T x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
// ---- centres of K (section 12) ----

// Where the centres of a query block's sequence lie among all; 0 where keys have none, or the sequence no tokens: its first page may then be any number.
DEVICE u32 centre_row(const DecodeParams& p, int b, int kv_len) {
    if constexpr (!HAS_CENTRES) return 0;
    const int sequence = query_block(p, b).sequence;
    if (!p.centre_rows) return (u32)sequence;
    const u32 row = p.centre_rows[(long long)sequence * p.centre_rows_stride];  // loaded while the length may still be
    return kv_len > 0 ? row : 0;
}

// The two centres of a row of centres and a KV head, one behind the other.
DEVICE const u16* find_centres(const DecodeParams& p, u32 row, int kv_head) {
    return HAS_CENTRES ? centre_at<K_DIM>(p.centres, row, p.centre_stride, kv_head) : nullptr;
}
// Brings both centres near.
DEVICE void prefetch_centres(const u16* centres, int lane) {
    constexpr int LINES = (4 * K_DIM + 127) / 128;
    if (lane < LINES) prefetch_line(centres + lane * 64);
}
// The elements of a centre that meet those of q' in this lane.
struct CentreElements {
    uint2 of[HAS_CENTRES ? Keys::PANELS : 1];

    METHOD void load(const u16* centre, int lane) {
#pragma unroll
        for (int panel = 0; HAS_CENTRES && panel < Keys::PANELS; panel++) of[panel] = *(const uint2*)(centre + panel * 16 + 4 * (lane % 4));
    }
};
// What a row's scores count from on the grid where their tokens' keys lack the centre; x are the lane's elements of q'.
DEVICE float score_base(const float (&x)[Keys::PANELS][4], const CentreElements& centre) {
    float sum[4] = {};
#pragma unroll
    for (int panel = 0; panel < Keys::PANELS; panel++) {
        const uint2 c = centre.of[panel];
        const u32 halves[4] = {c.x << 16, c.x & 0xffff0000, c.y << 16, c.y & 0xffff0000};
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fmaf(bits_float(float_bits(x[panel][i]) + 128 & ~255u), bits_float(halves[i]), sum[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i] = sum[i] + __shfl_xor_sync(~0u, sum[i], 2);
        sum[i] = sum[i] + __shfl_xor_sync(~0u, sum[i], 1);
    }
    return SCORE_BASE + ((sum[0] + sum[2]) + (sum[1] + sum[3]));
}

// Loads this lane's elements of N rows: all of them, before one is used.
template <int N> DEVICE void load_elements(const QueryRow (&rows)[N], int lane, float (&x)[N][Keys::PANELS][4]) {
    auto load = [&](auto narrow) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int panel = 0; panel < Keys::PANELS; panel++) {
                if (Keys::BITS == 16) rows[n].template pairs<decltype(narrow)::value>(panel * 16 + 2 * (lane % 4), x[n][panel]);
                else rows[n].template four<decltype(narrow)::value>(panel * 16 + 4 * (lane % 4), x[n][panel]);
            }
    };
    if (rows[0].dtype == Dtype::F32) load(Is<false>());
    else load(Is<true>());
}
// Panels of 16 dims of a quantization group of K, and where those of a group begin; the last group has what is left.
constexpr int GROUP_PANELS = Keys::GROUP_DIMS / 16;
constexpr int first_panel(int group) { return smaller(group * GROUP_PANELS, Keys::PANELS); }
// The part of a query whose step its elements in a panel have.
constexpr int part_of(int panel) { return QUERY_PARTS == 1 ? 0 : panel / GROUP_PANELS; }

// The largest magnitudes of a row's parts.
struct Largest {
    float of_part[QUERY_PARTS];
};
// Rotates a row where K is; returns its largest magnitudes.
DEVICE Largest rotate_row(float (&x)[Keys::PANELS][4], int lane) {
    if constexpr (Keys::IS_ROTATED) rotate_back<Keys, 4>(x, lane % 4);
    float largest[QUERY_PARTS][4] = {};
#pragma unroll
    for (int panel = 0; panel < Keys::PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 4; i++) largest[part_of(panel)][i] = fmaxf(largest[part_of(panel)][i], fabsf(x[panel][i]));
    Largest found;
#pragma unroll
    for (int part = 0; part < QUERY_PARTS; part++) {
        const float (&x)[4] = largest[part];
        found.of_part[part] = quad_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
    }
    return found;
}

// Section 3: the step of a row in 8 bits, and the reciprocals of its parts' steps, from its largest magnitudes. If those are too small to count, all codes are zeros,
// whose step is any number but zero, by which -inf of a hidden token stays what it is.
struct QueryStep {
    float step, inverse[QUERY_PARTS];
    float ratio;  // of two parts: the second step in the first one's
};
DEVICE QueryStep query_step(Largest largest) {
    float (&a)[QUERY_PARTS] = largest.of_part;
    if constexpr (QUERY_PARTS == 2) {
        const float first = a[0];
        a[0] = fmaxf(first, a[1] * 0x1p-24f);
        a[1] = fmaxf(a[1], first * 0x1p-24f);
    }
    const bool counts = a[0] >= 0x1p-60f;
    QueryStep found;
    found.step = counts ? a[0] * bits_float(0x3C010204) : 1.0f;
#pragma unroll
    for (int part = 0; part < QUERY_PARTS; part++) found.inverse[part] = a[part] >= 0x1p-60f ? 127.0f * rcp(a[part]) : 0.0f;
    found.ratio = QUERY_PARTS == 2 && counts ? a[QUERY_PARTS - 1] * rcp(a[0]) : 0.0f;
    return found;
}
// Four elements in 8 bits.
DEVICE u32 query_codes(const float (&x)[4], float inverse) {
    u32 r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = float_bits(x[i] * inverse + MAGIC);
    return __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
}

}  // namespace attn
