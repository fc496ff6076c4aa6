// grid_functions.cu: what the device gives for every input of the functions of docs/arithmetic.md, section 5, that are not IEEE operations.
//
// Grid      any; 128 threads.
// Reads     nothing.
// Writes    points: 2^(n/64); scales: the f16 numbers from +0 on, as V's scales on the grid. The host judges them (attn-core/src/grid.rs).
// Shared    none.
// Host      attn-cuda/src/grid_functions.rs; parameters in kernels/src/cuda/params.rs.
#include "common/arithmetic.cuh"
#include "common/params.h"

namespace attn {

extern "C" __global__ void attn_grid_functions(const __grid_constant__ GridFunctionsParams p) {
    int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < p.num_points; i += step) p.points[i] = exp2_of_point((float)(p.first_point + i) * 0.015625f);
    for (int i = first; i < p.num_scales; i += step) p.scales[i] = grid_scale(half_float((u16)i));
}

}  // namespace attn
