/* SPDX-License-Identifier: BSD-3-Clause
 *
 * fdm_name_cuda_modules includes this file before every CUDA source and defines FDM_MODULE. nvcc names a source's
 * internal symbols after its first external definition, or after the process id if there is none. A source that only
 * instantiates templates would then differ in each build. The linker removes the variable.
 */
#pragma once

namespace fdm::cuda_module {
extern const char FDM_MODULE;
const char FDM_MODULE = 0;
} // namespace fdm::cuda_module
