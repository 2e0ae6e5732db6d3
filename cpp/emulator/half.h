// SPDX-License-Identifier: BSD-3-Clause
// CUDA's 16-bit float types. Their formats are those of ../cpu/scalar.h.
#pragma once

#include "../cpu/scalar.h"

namespace fdm::emulator {

template <class OwnFormat> struct Half {
  using Format = OwnFormat;
  uint16_t bits;
  Half() = default;
  explicit Half(float x) : bits(Format::store(x)) {}
  explicit operator float() const { return Format::load(bits); }
};

template <class Format> struct alignas(4) HalfPair {
  Half<Format> x, y;
};

} // namespace fdm::emulator
