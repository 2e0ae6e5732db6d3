// SPDX-License-Identifier: BSD-3-Clause
// The table of the emulated pack: the CUDA pack's table, for CPU tensors.
#include <string>

#include "../pack.h"

// The build renames the function of the CUDA pack, in these sources too.
#undef flash_dmattn_pack

extern "C" const fdm_pack *flash_dmattn_cuda_pack(void);

extern "C" FDM_PACK_EXPORT const fdm_pack *flash_dmattn_pack(void) {
  static const std::string features = "emulation of " + std::string(flash_dmattn_cuda_pack()->features);
  static const fdm_pack table = [] {
    fdm_pack own = *flash_dmattn_cuda_pack();
    own.compiler = "gcc " __VERSION__;
    own.features = features.c_str();
    own.device_type = FDM_CPU;
    own.cuda_version = own.arch = 0;
    own.key_bias_dtypes = 1u << FDM_FLOAT64;
    return own;
  }();
  return &table;
}
