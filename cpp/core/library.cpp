// SPDX-License-Identifier: BSD-3-Clause
#include "library.h"

#include <algorithm>
#include <utility>

#include "error.h"
#include "shared_library.h"

namespace fdm {

namespace {

template <typename... Parts> [[noreturn]] void refuse(const std::string &path, const Parts &...parts) {
  Text message;
  message << path << ": ";
  (message << ... << parts);
  throw PackError(message.str());
}

void check_table(const std::string &path, const fdm_pack *table) {
  if (table == nullptr) refuse(path, FDM_PACK_SYMBOL, "() returned no table");
  // Fields after abi_version must not be read before the version is checked.
  if (table->abi_version != FDM_PACK_ABI_VERSION)
    refuse(path, "the kernel pack has ABI version ", table->abi_version, ", but this flash_dmattn needs ABI version ",
           FDM_PACK_ABI_VERSION, "; install a pack of this flash_dmattn's version");
  if (table->struct_size < sizeof(fdm_pack))
    refuse(path, "the kernel pack's table has ", table->struct_size, " bytes, but ABI version ", FDM_PACK_ABI_VERSION,
           " needs at least ", sizeof(fdm_pack));
  if (table->name == nullptr || table->version == nullptr || table->compiler == nullptr || table->features == nullptr)
    refuse(path, "the kernel pack's table lacks its name, version, compiler or features");
  if (table->workspace_bytes == nullptr || table->plan == nullptr || table->forward == nullptr ||
      table->backward == nullptr || table->selection_workspace_bytes == nullptr || table->select == nullptr ||
      table->select_and_plan == nullptr)
    refuse(path, "the kernel pack's table lacks an entry point");
}

} // namespace

Pack::Pack(std::string path) : path_(std::move(path)), table_(nullptr) {
  std::string reason;
  void *library = open_library(path_, reason);
  if (library == nullptr) refuse(path_, reason);
  // Never closed: a pack may have started threads, and enqueued work may outlive every Python object.
  auto function = reinterpret_cast<fdm_pack_function>(find_symbol(library, FDM_PACK_SYMBOL));
  if (function == nullptr) refuse(path_, "the library is no kernel pack: it has no symbol ", FDM_PACK_SYMBOL);
  table_ = function();
  check_table(path_, table_);
}

namespace {

int64_t max_tile_keys(const fdm_plan_layout &layout, int64_t max_kept) {
  if (max_kept <= 0 || layout.most_tile_keys == INT64_MAX) return layout.most_tile_keys;
  return std::min<int64_t>(max_kept, INT32_MAX) + layout.tile_rows - 1;
}

} // namespace

int64_t plan_bytes(const fdm_plan_layout &layout, int64_t lists, int64_t keys, int64_t row_keys, int64_t rows,
                   int64_t sequences, int64_t max_kept) {
  const int64_t tiles = layout.tile_rows > 0 ? rows / layout.tile_rows + sequences : 0;
  const int64_t tile_keys = std::min(row_keys, max_tile_keys(layout, max_kept));
  return layout.fixed + lists * (layout.per_list + keys * layout.per_key +
                                 tiles * (layout.per_tile + tile_keys * layout.per_tile_key));
}

} // namespace fdm
