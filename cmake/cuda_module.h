/* SPDX-License-Identifier: BSD-3-Clause
 *
 * Included ahead of every CUDA source by fdm_name_cuda_modules, which defines FDM_MODULE. nvcc names a source's internal
 * symbols after its first external definition, and without any after its process id: a source that only instantiates
 * templates would differ in each build. The linker drops the variable.
 */
#pragma once

namespace fdm::cuda_module {
extern const char FDM_MODULE;
const char FDM_MODULE = 0;
} // namespace fdm::cuda_module
