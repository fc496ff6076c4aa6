// append.cu: quantizes new tokens and writes them into pages: the bytes of FORMATS.md.
//
// Grid      one token: (heads / 4, batch), two warps per head; by slots: (tokens, heads / 4), two warps per head; else (page jobs, num_kv_heads, batch), 128
//           threads. With rotary positions there are query heads behind the KV heads: a warp to four; else a CTA to each of a page job.
// Split     one token per sequence is latency alone (launch, length, page, store): a warp takes K or V of one head, a lane stores what it
//           loaded, and shared memory is not used. With several tokens a CTA owns a page of a head.
// Instance  page/instance.cuh; ATTN_ROTARY: whether K is rotated by its position before it is encoded, and queries beside it.
// Reads     k, v [token][num_kv_heads][head_dim], f32, f16 or bf16; kv_lens, which count the new tokens already, or slots; positions, cos_sin, q.
//           By slots also the centres of K, where keys lack them.
// Writes    pool [page][kv_head][run]: home pages, and the residual pages of each sequence's first and last pages; q_out; centres.
// Numerics  page/token.cuh; compiled without contraction, subnormals kept.
// Host      attn-cuda/src/native/append.rs; parameters in kernels/src/cuda/params.rs.
#include "ops/rotary.cuh"
#include "page/second_centre.cuh"

namespace attn {

typedef Token<Values, V_LIES_ALONG_TOKENS> VToken;

DEVICE u8* run_of(const AppendParams& p, u32 page, int head) { return p.pool + page * p.page_stride + (u32)head * Run::BYTES; }
DEVICE u32 page_of(const AppendParams& p, int b, u32 page) { return p.page_table[(long long)b * p.page_table_stride + page]; }
constexpr u32 NO_PAGE = ~0u;  // in the slot of a page that keeps no residuals
DEVICE u32 residual_page_of(const AppendParams& p, int b, u32 page) { return p.residual_pages[residual_slot(p.residual_ring, b, page)]; }
DEVICE float scale_of(const float* scales, int head) { return scales ? scales[head] : 1.0f; }

// Token t of a page: the run of its page, and that of the residual page, null if the page keeps no residuals.
struct Place {
    u8 *run, *residuals;
    u32 t;
    int of_sequence;  // the token's number in its sequence; 0 where a slot says the place
    // Whether the token eight behind is stored by this launch, too: in the same page, and with residuals in the same one.
    bool joins_codes, joins_residuals;
    u16* centre;  // of K, which is taken off the token's key; null: none
    bool makes_first;   // whether the token's key is the centre
    bool makes_second;  // whether the token is the last one of a first tile, which lies in its page, and makes the second centre
};

DEVICE Place place_of(const AppendParams& p, int b, u32 page, u32 t, int head, bool keeps_residuals) {
    constexpr bool HAS_WINDOW = Keys::WINDOW || Values::WINDOW;
    u8* residuals = nullptr;
    if (HAS_WINDOW && keeps_residuals) {
        u32 residual_page = residual_page_of(p, b, page);
        if (residual_page != NO_PAGE) residuals = run_of(p, residual_page, head);
    }
    return {run_of(p, page_of(p, b, page), head), residuals, t, (int)(page * PAGE + t)};
}

DEVICE void load_k(const AppendParams& p, KToken& k, long long token, int head, int lane) {
    k.load(p.k, p.dtype, p.k_token_stride, token * p.k_token_stride + (long long)head * K_DIM, lane);
}
DEVICE void load_v(const AppendParams& p, VToken& v, long long token, int head, int lane) {
    v.load(p.v, p.dtype, p.v_token_stride, token * p.v_token_stride + (long long)head * V_DIM, lane);
}
DEVICE void store_k(const KToken& k, const Place& to, int lane) {
    k.store(to.run, to.run + Run::K_PARAMS, to.t, lane, to.joins_codes);
    if (Keys::WINDOW && to.residuals) k.store_residuals(to.residuals, to.t, lane, to.joins_residuals);
}
DEVICE void store_v(const VToken& v, const Place& to, int lane) {
    v.store(to.run + Run::V_CODES, to.run + Run::V_PARAMS, to.t, lane, false);
    if (Values::WINDOW && to.residuals) v.store_residuals(to.residuals + Run::V_RESIDUALS, to.t, lane, false);
}

// Makes the second centre, behind the first one, of a first tile in one page's run, to which this warp has stored the last token.
DEVICE void make_second_centre(const u8* run, u16* first, int lane) {
    if constexpr (Keys::MAY_HAVE_CENTRES && PAGES_OF_TILE == 1 && !Keys::WINDOW) {
        __syncwarp();
#pragma unroll 1
        for (int d = lane; d < K_DIM; d += 32) first[K_DIM + d] = second_centre(first[d], add_page(0.0f, run, nullptr, d));
    }
}

// ---- one token per sequence ----

// K of a token: its loads are issued before it is known where the token goes, and whether this warp takes it.
struct Key {
    KToken k;
    RotaryOf<KToken> rotary;

    METHOD void load(const AppendParams& p, long long token, int head, int lane) {
        load_k(p, k, token, head, lane);
        if constexpr (HAS_ROTARY) rotary.load_partners(p, token, head, lane);
    }
    // The run of `to` is null if the token goes nowhere.
    METHOD void append(const AppendParams& p, const Place& to, int head, int lane) {
        if (!to.run) return;
        if constexpr (HAS_ROTARY)
            if (!rotary.load_angles(p, to.of_sequence, lane)) return;
        k.widen();
        if constexpr (HAS_ROTARY) rotary.rotate(p, k, lane);
        k.to_stored(lane);
        if constexpr (Keys::MAY_HAVE_CENTRES)
            if (to.centre) k.take_off(to.centre, to.makes_first, lane);
        k.encode(scale_of(p.k_tensor_scales, head), lane);
        store_k(k, to, lane);
        if (to.makes_second) make_second_centre(to.run, to.centre, lane);
    }
};
// `place()` is asked for behind the token's loads.
template <class PlaceOf> DEVICE void append_v(const AppendParams& p, long long token, int head, int lane, PlaceOf place) {
    if (LATENTS) return;
    VToken v;
    load_v(p, v, token, head, lane);
    const Place to = place();
    if (!to.run) return;
    v.widen();
    v.to_stored(lane);
    v.encode(scale_of(p.v_tensor_scales, head), lane);
    store_v(v, to, lane);
}
// A warp's KV head, where columns of CTAs share them, and whether it takes V.
struct HeadOfWarp {
    int head, lane;
    bool is_v;

    static METHOD HeadOfWarp of(int column) {
        const int warp = warp_id(), warps = blockDim.x / 32;
        return {column * (warps / 2) + warp / 2, (int)threadIdx.x % 32, warp % 2 == 1};
    }
};
// Behind the columns of KV heads: rotates the warp's query heads of a token, which is token `of_sequence` of its sequence.
DEVICE bool rotates_query(const AppendParams& p, int column, int token, int of_sequence) {
    const int warp = warp_id(), warps = blockDim.x / 32, first = column - (p.num_kv_heads + warps / 2 - 1) / (warps / 2);
    if (first < 0) return false;
    rotate_queries<QUERY_HEADS>(p, token, of_sequence, (first * warps + warp) * QUERY_HEADS, threadIdx.x % 32);
    return true;
}
DEVICE void append_one(const AppendParams& p) {
    if constexpr (HAS_ROTARY)
        if (rotates_query(p, blockIdx.x, blockIdx.y, p.kv_lens[blockIdx.y] - 1)) return;
    const HeadOfWarp warp = HeadOfWarp::of(blockIdx.x);
    const int b = blockIdx.y, head = warp.head;
    if (head >= p.num_kv_heads) return;
    auto place = [&] {
        const bool has_window = warp.is_v ? Values::WINDOW : Keys::WINDOW;
        const int len = p.kv_lens[b];
        const u32 at = len - 1;
        return len <= 0 ? Place{} : place_of(p, b, at / PAGE, at % PAGE, head, has_window);
    };
    if (warp.is_v) {
        append_v(p, b, head, warp.lane, place);
        return;
    }
    Key key;
    key.load(p, b, head, warp.lane);
    key.append(p, place(), head, warp.lane);
}

// ---- tokens that bring their slots ----

// The words that say where a token goes, loaded at once, so that no load waits for another.
struct Slot {
    long long at;
    u32 residual_page;
    u32 centres;   // the row of its sequence's
    int position;  // of a token with centres in its sequence

    static METHOD bool has_centres(const AppendParams& p) { return Keys::MAY_HAVE_CENTRES && p.centres; }
    static METHOD Slot load(const AppendParams& p, int token, bool is_v) {
        const bool has_window = is_v ? Values::WINDOW : Keys::WINDOW, has = has_centres(p);
        return {p.slots[token], has_window ? p.residual_pages[token] : NO_PAGE, has && !is_v ? p.centre_rows[token] : 0, has ? p.centre_positions[token] : 0};
    }
    METHOD bool is_stored(const AppendParams& p) const {
        if (at < 0) return false;
        if (!has_centres(p)) return true;
        switch (p.centre_tokens) {
        case FIRST_TOKENS: return position == 0;
        case OF_FIRST_TILES: return position > 0 && position < TILE;
        case BEHIND_FIRST_TILES: return position >= TILE;
        default: return true;
        }
    }
    METHOD Place place(const AppendParams& p, int head) const {
        if (!is_stored(p)) return Place{};
        Place place = {run_of(p, (u32)(at / PAGE), head), residual_page != NO_PAGE ? run_of(p, residual_page, head) : nullptr, (u32)(at % PAGE), 0};
        if (has_centres(p)) {
            place.centre = centre_at<K_DIM>(p.centres, centres, p.centre_stride, head) + (position < TILE ? 0 : K_DIM);
            place.makes_first = position == 0;
            place.makes_second = position == TILE - 1 && p.centre_tokens == EACH_WITH_CENTRES;
        }
        return place;
    }
};

DEVICE void append_by_slots(const AppendParams& p) {
    if constexpr (HAS_ROTARY)
        if (rotates_query(p, blockIdx.y, blockIdx.x, 0)) return;
    const HeadOfWarp warp = HeadOfWarp::of(blockIdx.y);
    const int first = blockIdx.x, head = warp.head;
    if (head >= p.num_kv_heads) return;
    const Slot slot = Slot::load(p, first, warp.is_v);
    if (warp.is_v) {
        append_v(p, first, head, warp.lane, [&] { return slot.place(p, head); });
        return;
    }
    const int eighth = first + 8;
    const bool has_eighth = KToken::SHARES_BYTES && eighth < p.tokens;
    const Slot behind = has_eighth ? Slot::load(p, eighth, false) : Slot{-1, NO_PAGE, 0, 0};
    const bool goes = has_eighth && (!HAS_ROTARY || has_position(p, eighth, 0));
    Key key;
    key.load(p, first, head, warp.lane);
    Place to = slot.place(p, head);
    to.joins_codes = goes && !is_high(to.t) && behind.at == slot.at + 8 && behind.is_stored(p);
    to.joins_residuals = to.joins_codes && behind.residual_page == slot.residual_page;
    key.append(p, to, head, warp.lane);
}

// ---- several tokens per sequence ----

// Tokens [t0, t1) of a page of one head.
struct Job {
    int head, t0, t1, warp, warps, lane;
    long long token0;  // the page's token 0 in k, v
    Place page;        // of token 0

    METHOD Place at(int t, bool joins = false) const { return {page.run, page.residuals, (u32)t, page.of_sequence + t, joins, joins}; }
};

DEVICE void append_rows(const AppendParams& p, const Job& j) {
    for (int t = j.t0 + j.warp; t < j.t1; t += j.warps) {
        const int eighth = t + 8;
        Key key;
        key.load(p, j.token0 + t, j.head, j.lane);
        bool joins = KToken::SHARES_BYTES && eighth < j.t1;
        if (HAS_ROTARY && joins) joins = has_position(p, j.token0 + eighth, j.page.of_sequence + eighth);
        key.append(p, j.at(t, joins), j.head, j.lane);
    }
}

DEVICE void append_many(const AppendParams& p) {
    const int b = blockIdx.z, end = p.kv_lens[b], begin = end - p.tokens;
    if (p.tokens <= 0 || begin < 0) return;
    const int first = begin / PAGE, last = (end - 1) / PAGE, page = first + (int)blockIdx.x;
    if (page > last) return;
    Job j;
    j.head = blockIdx.y, j.warp = warp_id(), j.warps = blockDim.x / 32, j.lane = threadIdx.x % 32;
    j.t0 = page == first ? begin % PAGE : 0, j.t1 = page == last ? (end - 1) % PAGE + 1 : PAGE;
    j.token0 = (long long)b * p.tokens + (long long)page * PAGE - begin;
    if (HAS_ROTARY && j.head >= p.num_kv_heads) {
        for (int t = j.t0 + j.warp; t < j.t1; t += j.warps) rotate_queries<1>(p, j.token0 + t, page * PAGE + t, j.head - p.num_kv_heads, j.lane);
        return;
    }
    // The first pages have slots of residuals of their own; another slot belongs to the last of the pages that share it.
    j.page = place_of(p, b, page, 0, j.head, page < FIRST_RESIDUAL_PAGES || page + (int)p.residual_ring > last);
    append_rows(p, j);
    if (LATENTS) return;
    const float scale = scale_of(p.v_tensor_scales, j.head);
    // Other warps take the first tokens than of K.
    for (int t = j.t0 + (j.warp + j.warps / 2) % j.warps; t < j.t1; t += j.warps) {
        VToken v;
        load_v(p, v, j.token0 + t, j.head, j.lane);
        v.widen();
        v.to_stored(j.lane);
        v.encode(scale, j.lane);
        store_v(v, j.at(t), j.lane);
    }
}

extern "C" __global__ void __launch_bounds__(256, larger(K_DIM, V_DIM) > 256 ? 2 : 5) attn_append(const __grid_constant__ AppendParams p) {
    // Every CTA waits, because a launch that waits for this one relies on those before it, too. A launch that waits for all of this one should
    // not begin before it ends (append to append: 4.2 µs, 5.0 if launched early), but a decode has other work meanwhile.
    wait_for_dependencies();
    if (p.is_followed) launch_dependents();
    if (p.slots) append_by_slots(p);
    else if (p.tokens == 1) append_one(p);
    else append_many(p);
}

}  // namespace attn
