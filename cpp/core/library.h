// SPDX-License-Identifier: BSD-3-Clause
//
// A kernel pack: a shared library that stays loaded for the life of the process.
#pragma once

#include <cstdint>
#include <string>

#include "../pack.h"

namespace fdm {

class Pack {
public:
  // Throws PackError with the reason if the library cannot be opened, is no kernel pack, or has another ABI version.
  explicit Pack(std::string path);

  const std::string &path() const { return path_; }
  const fdm_pack &table() const { return *table_; }

private:
  std::string path_;
  const fdm_pack *table_;
};

// The formula of fdm_plan_layout.
int64_t plan_bytes(const fdm_plan_layout &layout, int64_t lists, int64_t keys, int64_t row_keys, int64_t rows,
                   int64_t sequences, int64_t max_kept);

} // namespace fdm
