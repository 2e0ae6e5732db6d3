// SPDX-License-Identifier: BSD-3-Clause
// Compiled once for each SIMD level: FDM_SIMD_NAMESPACE is its namespace, FDM_SIMD_BYTES its vector size.
#include "backward.h"
#include "key_mass.h"

#define FDM_TEXT_OF(x) #x
#define FDM_TEXT(x) FDM_TEXT_OF(x)

namespace fdm::cpu::FDM_SIMD_NAMESPACE {

const Kernels &kernels() {
  static constexpr Kernels table{FDM_TEXT(FDM_SIMD_NAMESPACE), forward_tile,  backward_tile,
                                 per_query_dbias_tile,         key_mass_tile, load_rows};
  return table;
}

} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
