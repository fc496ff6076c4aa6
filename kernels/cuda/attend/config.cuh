// `Config`: what the kernel at hand is compiled for, as the headers of attend/ see it. This file and those that it includes are the only ones that
// read the macros of decode kernels (kernels/src/cuda/instance.rs).
#pragma once
#if defined(ATTN_MANY_ROWS)
#include "attend/many_rows/config.cuh"
#elif defined(ATTN_LOW_LATENCY) || defined(ATTN_MERGE_GLOBAL)
#include "attend/low_latency/config.cuh"
#else
#include "attend/split_kv/config.cuh"
#endif

namespace attn {

#if defined(ATTN_MANY_ROWS)
using Config = ManyRowsConfig;
#elif defined(ATTN_LOW_LATENCY) || defined(ATTN_MERGE_GLOBAL)
using Config = LowLatencyConfig;
#else
using Config = SplitKvConfig;
#endif

constexpr bool HAS_SCORE_MODS = ATTN_SCORE_MODS;  // window, soft cap, ALiBi
constexpr bool HAS_CENTRES = ATTN_CENTRES;        // keys lack centres of K
static_assert(!HAS_CENTRES || (INTEGER && PAGE != 0 && Keys::MAY_HAVE_CENTRES), "instance.rs");

// Lanes that arrive on an mbarrier for their warp, after __syncwarp: one. racecheck does not see that this orders the other lanes, too, so
// .ci/gpu compiles for it with all of them.
#ifdef ATTN_EVERY_LANE_ARRIVES
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif

// Further arguments of a kernel, tensor maps of strided rows, and where they are.
#if ATTN_PAGE == 0
#define ATTN_ROW_MAPS , const __grid_constant__ RowMaps maps
#define ATTN_ROW_MAPS_OR_NULL &maps
#else
#define ATTN_ROW_MAPS
#define ATTN_ROW_MAPS_OR_NULL nullptr
#endif

}  // namespace attn
