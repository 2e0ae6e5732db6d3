// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/copy.cuh. A cp.async copy completes when a thread waits for it, or at random.
#pragma once

#include <cstdint>
#include <cstring>

namespace fdm::cuda::ptx {

inline uint32_t shared_address(const void *p) { return emulator::shared_address(p); }

namespace emulated {

template <class T> T &at(uint32_t smem) {
  if (smem % sizeof(T) != 0) emulator::fail("an address in shared memory is not aligned");
  return *reinterpret_cast<T *>(emulator::shared_pointer(smem));
}

} // namespace emulated

inline void cp_async_up_to_16(uint32_t smem, const void *gmem, int bytes) {
  if (smem % 16 != 0 || (bytes > 0 && reinterpret_cast<uintptr_t>(gmem) % 16 != 0))
    emulator::fail("cp.async of 16 bytes is not aligned");
  emulator::defer(emulator::Queue::copies, [=] {
    char *to = emulator::shared_pointer(smem);
    if (bytes > 0) std::memcpy(to, gmem, size_t(bytes));
    std::memset(to + bytes, 0, size_t(16 - bytes));
  });
}
inline void cp_async_16(uint32_t smem, const void *gmem, bool valid) { cp_async_up_to_16(smem, gmem, valid ? 16 : 0); }

inline void cp_async_4(uint32_t smem, const void *gmem) {
  if (smem % 4 != 0 || reinterpret_cast<uintptr_t>(gmem) % 4 != 0) emulator::fail("cp.async of 4 bytes is not aligned");
  emulator::defer(emulator::Queue::copies, [=] { std::memcpy(emulator::shared_pointer(smem), gmem, 4); });
}
inline void prefetch_l2(const void *) {}

inline void store_global_16(void *gmem, const uint32_t (&words)[4]) {
  if (reinterpret_cast<uintptr_t>(gmem) % 16 != 0) emulator::fail("a store of 16 bytes is not aligned");
  std::memcpy(gmem, words, sizeof words);
}

inline void store_shared(uint32_t smem, uint32_t value) { emulated::at<uint32_t>(smem) = value; }
inline void store_shared(uint32_t smem, uint4 words) { emulated::at<uint4>(smem) = words; }
inline uint4 load_shared_16_bytes(uint32_t smem) { return emulated::at<uint4>(smem); }
inline uint16_t load_shared_2_bytes(uint32_t smem) { return emulated::at<uint16_t>(smem); }

inline void cp_async_fence() { emulator::commit(emulator::Queue::copies); }
template <int Pending> void cp_async_wait() { emulator::complete(emulator::Queue::copies, Pending); }

} // namespace fdm::cuda::ptx
