// What this machine can do at best, measured with bare loops: the limits that kernels are held against.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace tricorn {

// {read GB/s, int8 Gop/s, bf16 Gflop/s, fp32 Gflop/s} with all `threads` at work, in the instructions of these kernels.
std::vector<double> measure_machine(const Kernels& kernels, int threads);

}  // namespace tricorn
