// Division by a number that the host has prepared (FastDivmod of params.h), for numbers below 2^31.
#pragma once
#include "common/ptx.cuh"

#include "common/params.h"

namespace attn {

DEVICE unsigned int operator/(unsigned int n, const FastDivmod& d) { return __umulhi(2 * n, d.multiplier) >> d.shift; }
DEVICE unsigned int ceil_div(unsigned int n, const FastDivmod& d) { return (n + d.divisor - 1) / d; }

}  // namespace attn
