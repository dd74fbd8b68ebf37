// Compiled once per instruction set, with TRICORN_ISA naming it.
#include "kernels.hpp"

#include "attention.hpp"
#include "linear.hpp"
#include "peak.hpp"
#include "rows.hpp"
#include "sampler.hpp"

namespace tricorn {

#define TRICORN_NAME_OF(isa) #isa
#define TRICORN_NAME(isa) TRICORN_NAME_OF(isa)
#define TRICORN_JOIN_OF(a, b) a##b
#define TRICORN_JOIN(a, b) TRICORN_JOIN_OF(a, b)

const Kernels& TRICORN_JOIN(kernels_, TRICORN_ISA)() {
    using namespace TRICORN_ISA;
    static const Kernels table{
        TRICORN_NAME(TRICORN_ISA), embed, norm, linear, gated, rope_store, attention, quantize, sample, read, peak};
    return table;
}

}  // namespace tricorn
