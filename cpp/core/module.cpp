// SPDX-License-Identifier: BSD-3-Clause
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <vector>

#include "call.h"
#include "checks.h"
#include "error.h"
#include "forgetting.h"
#include "library.h"
#include "problem.h"
#include "selection.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace fdm;

namespace {

nb::list dtypes_of(const Pack &pack) {
  nb::list names;
  for (int32_t dtype = FDM_FLOAT32; dtype <= FDM_UINT8; ++dtype)
    if ((pack.table().dtypes & only(dtype)) != 0) names.append(nb::str(dtype_name(dtype)));
  return names;
}

nb::dict plan_layouts_of(const Pack &pack) {
  constexpr const char *names[FDM_MASK_KIND_COUNT] = {"none", "keys", "intervals", "rows"}; // of enum fdm_mask_kind
  nb::dict layouts;
  for (int kind = 0; kind < FDM_MASK_KIND_COUNT; ++kind) {
    const fdm_plan_layout &l = pack.table().plan_layouts[kind];
    layouts[names[kind]] =
        nb::make_tuple(l.fixed, l.per_list, l.per_key, l.per_tile, l.per_tile_key, l.tile_rows, l.most_tile_keys);
  }
  return layouts;
}

nb::dict launch_counts_of(const Pack &pack) {
  nb::dict found;
  if (pack.table().launch_counts == nullptr) return found;
  std::vector<fdm_launch_count> counts(size_t(pack.table().launch_counts(nullptr, 0)));
  const int32_t number = pack.table().launch_counts(counts.data(), int32_t(counts.size()));
  counts.resize(std::min(counts.size(), size_t(number)));
  for (const fdm_launch_count &count : counts) found[count.kernel] = count.launches;
  return found;
}

const char *key_mass_biases_of(const Pack &pack) {
  const fdm_pack &table = pack.table();
  if (table.key_mass == nullptr || table.key_mass_biases == FDM_KEY_MASS_NONE) return "none";
  return table.key_mass_biases == FDM_KEY_MASS_ALL ? "all" : "keys";
}

void bind_pack(nb::module_ &module) {
  nb::class_<Pack>(module, "Pack")
      .def_prop_ro("path", &Pack::path)
      .def_prop_ro("name", [](const Pack &pack) { return pack.table().name; })
      .def_prop_ro("version", [](const Pack &pack) { return pack.table().version; })
      .def_prop_ro("compiler", [](const Pack &pack) { return pack.table().compiler; })
      .def_prop_ro("features", [](const Pack &pack) { return pack.table().features; })
      .def_prop_ro("abi_version", [](const Pack &pack) { return pack.table().abi_version; })
      .def_prop_ro("device_type", [](const Pack &pack) { return pack.table().device_type; })
      .def_prop_ro("cuda_version", [](const Pack &pack) { return pack.table().cuda_version; })
      .def_prop_ro("arch", [](const Pack &pack) { return pack.table().arch; })
      .def_prop_ro("max_head_dim", [](const Pack &pack) { return pack.table().max_head_dim; })
      .def_prop_ro("dtypes", &dtypes_of)
      .def_prop_ro("wants_out_rest", [](const Pack &pack) { return pack.table().wants_out_rest != 0; })
      .def_prop_ro("plan_layouts", &plan_layouts_of)
      .def_prop_ro("lists_keys", [](const Pack &pack) { return pack.table().lists_keys != FDM_LISTS_NONE; })
      .def_prop_ro("orders_lists", [](const Pack &pack) { return pack.table().lists_keys == FDM_LISTS_IN_ORDER; })
      .def_prop_ro("plans_blocks", [](const Pack &pack) { return pack.table().plan_blocks != nullptr; })
      .def_prop_ro("forgets", [](const Pack &pack) { return pack.table().forget != nullptr; })
      .def_prop_ro("launch_counts", &launch_counts_of)
      .def_prop_ro("row_bytes", [](const Pack &pack) { return pack.table().row_bytes; })
      .def_prop_ro(
          "narrow_widths",
          [](const Pack &pack) { return nb::make_tuple(pack.table().narrow_head_dim, pack.table().narrow_value_dim); })
      .def_prop_ro("key_mass_biases", &key_mass_biases_of)
      .def("__repr__", [](const Pack &pack) {
        return "<flash_dmattn kernel pack " + std::string(pack.table().name) + " from " + pack.path() + ">";
      });
}

void bind_problem(nb::module_ &module) {
  nb::class_<Problem>(module, "Problem")
      .def(
          "__init__",
          [](Problem *self, const Pack &pack, nb::args fields, int32_t threads, uintptr_t stream, nb::kwargs named) {
            new (self) Problem(pack.table(), read_record<AttentionRecord>(fields, named), {threads, stream});
          },
          "pack"_a, "fields"_a, "threads"_a = 1, "stream"_a = 0, "named"_a)
      .def("list_keys", &Problem::set_key_lists, "indices"_a, "index_bias"_a.none())
      .def("take_blocks", &Problem::set_mask_blocks, "numbers"_a, "contents"_a, "kept"_a, "partial"_a)
      .def_prop_ro("plan_bytes", &Problem::plan_bytes)
      .def_prop_ro("plan_workspace_bytes", [](const Problem &self) { return self.workspace_bytes(FDM_PASS_PLAN); })
      .def_prop_ro("forward_workspace_bytes",
                   [](const Problem &self) { return self.workspace_bytes(FDM_PASS_FORWARD); })
      .def_prop_ro("backward_workspace_bytes",
                   [](const Problem &self) { return self.workspace_bytes(FDM_PASS_BACKWARD); })
      .def_prop_ro("key_mass_workspace_bytes",
                   [](const Problem &self) { return self.workspace_bytes(FDM_PASS_KEY_MASS); })
      .def("needs_row_copies", &Problem::needs_row_copies, "for_backward"_a)
      .def("key_mass", &Problem::key_mass, "mass"_a, "lse"_a, "plan"_a.none(), "workspace"_a.none())
      .def("describe", &Problem::describe, "gradients"_a, "selection"_a.none() = nb::none())
      .def("plan", &Problem::plan, "plan"_a.none(), "workspace"_a.none())
      .def("forward", &Problem::forward, "out"_a, "lse"_a, "plan"_a.none(), "workspace"_a.none(), "splits"_a = 0)
      .def("attend_bytes", &Problem::attend_bytes, "has_lse"_a, "has_plan"_a)
      .def(
          "attend",
          [](Problem &self, const TensorField &out, const TensorField &lse, const TensorField &plan,
             const TensorField &scratch) { self.attend(out, lse, plan, {scratch, "scratch"}); },
          "out"_a, "lse"_a.none(), "plan"_a.none(), "scratch"_a.none())
      .def("kept_bytes", nb::overload_cast<bool, bool>(&Problem::kept_bytes, nb::const_), "has_lse"_a, "has_plan"_a)
      .def(
          "keep",
          [](Problem &self, const TensorField &out, const TensorField &lse, const TensorField &plan,
             const TensorField &kept,
             const TensorField &workspace) { self.keep(out, lse, plan, kept, {workspace, "workspace"}); },
          "out"_a, "lse"_a.none(), "plan"_a.none(), "kept"_a.none(), "workspace"_a.none())
      .def(
          "backward",
          [](Problem &self, nb::handle dout, nb::handle dlse, nb::handle out, nb::handle lse, nb::dict gradients,
             const TensorField &plan, const TensorField &workspace, const TensorField &kept) {
            self.backward({dout, dlse, out, lse, read_gradients(gradients)}, plan, kept, {workspace, "workspace"});
          },
          "dout"_a, "dlse"_a.none(), "out"_a, "lse"_a.none(), "gradients"_a, "plan"_a.none(), "workspace"_a.none(),
          "kept"_a.none() = nb::none());
}

void bind_selection(nb::module_ &module) {
  nb::class_<Selection>(module, "Selection")
      .def(
          "__init__",
          [](Selection *self, const Pack &pack, nb::args fields, int32_t threads, uintptr_t stream, nb::kwargs named) {
            new (self) Selection(pack.table(), read_record<SelectionRecord>(fields, named), {threads, stream});
          },
          "pack"_a, "fields"_a, "threads"_a = 1, "stream"_a = 0, "named"_a)
      .def_prop_ro("workspace_bytes", [](const Selection &self) { return self.workspace_bytes(); })
      .def(
          "intervals",
          [](const Selection &self, const TensorField &start, const TensorField &end, const TensorField &workspace) {
            self.write_intervals(start, end, {workspace, "workspace"});
          },
          "start"_a, "end"_a, "workspace"_a.none())
      .def(
          "keep",
          [](const Selection &self, const TensorField &keep, const TensorField &workspace) {
            self.write_keep(keep, {workspace, "workspace"});
          },
          "keep"_a, "workspace"_a.none());
}

void bind_forgetting(nb::module_ &module) {
  nb::class_<Forgetting>(module, "Forgetting")
      .def(
          "__init__",
          [](Forgetting *self, const Pack &pack, const TensorField &log_forget, const TensorField &padding,
             const TensorField &cu_seqlens, double least, int32_t threads, uintptr_t stream) {
            new (self) Forgetting(pack.table(), log_forget, padding, cu_seqlens, least, {threads, stream});
          },
          "pack"_a, "log_forget"_a, "padding"_a.none(), "cu_seqlens"_a.none(), "least"_a, "threads"_a = 1,
          "stream"_a = 0)
      .def_prop_ro("workspace_bytes", &Forgetting::workspace_bytes)
      .def(
          "forget",
          [](const Forgetting &self, const TensorField &bias, const TensorField &start, const TensorField &end,
             double prune,
             const TensorField &workspace) { self.forget(bias, start, end, prune, {workspace, "workspace"}); },
          "bias"_a, "start"_a.none(), "end"_a.none(), "prune"_a, "workspace"_a.none())
      .def(
          "forget_backward",
          [](const Forgetting &self, const TensorField &dbias, const TensorField &dlog_forget,
             const TensorField &workspace) { self.forget_backward(dbias, dlog_forget, {workspace, "workspace"}); },
          "dbias"_a, "dlog_forget"_a, "workspace"_a.none());
}

// `results` is (start, end) or (keep,).
void bind_select(nb::module_ &module) {
  module.def(
      "select",
      [](const Pack &pack, int32_t threads, nb::tuple results, nb::handle inputs) {
        const auto record = read_record<SelectionRecord>(inputs);
        const Exchange exchange(record.bias.object());
        if (!exchange.can_allocate()) return false;
        const Selection selection(pack.table(), record, {threads});
        Workspace workspace(exchange);
        if (results.size() == 1) return selection.write_keep(nb::handle(results[0]), std::move(workspace));
        return selection.write_intervals(nb::handle(results[0]), nb::handle(results[1]), std::move(workspace));
      },
      "pack"_a, "threads"_a, "results"_a, "inputs"_a);
}

// Runs `compute` with forget gates, their padding and cu_seqlens, and memory of the gates' library.
template <class Compute>
bool with_gates(const Pack &pack, int32_t threads, nb::tuple gates, double least, const Compute &compute) {
  const Exchange exchange(gates[0]);
  if (!exchange.can_allocate()) return false;
  const TensorField log_forget = nb::handle(gates[0]), padding = nb::handle(gates[1]), bounds = nb::handle(gates[2]);
  return compute(Forgetting(pack.table(), log_forget, padding, bounds, least, {threads}), Workspace(exchange));
}

void bind_forget(nb::module_ &module) {
  module.def(
      "forget",
      [](const Pack &pack, int32_t threads, nb::tuple results, nb::tuple gates, double least, double prune) {
        return with_gates(pack, threads, gates, least, [&](const Forgetting &forgetting, Workspace &&workspace) {
          return forgetting.forget(nb::handle(results[0]), nb::handle(results[1]), nb::handle(results[2]), prune,
                                   std::move(workspace));
        });
      },
      "pack"_a, "threads"_a, "results"_a, "gates"_a, "least"_a, "prune"_a);
  module.def(
      "forget_backward",
      [](const Pack &pack, int32_t threads, nb::handle dbias, nb::handle dlog_forget, nb::tuple gates, double least) {
        return with_gates(pack, threads, gates, least, [&](const Forgetting &forgetting, Workspace &&workspace) {
          return forgetting.forget_backward(dbias, dlog_forget, std::move(workspace));
        });
      },
      "pack"_a, "threads"_a, "dbias"_a, "dlog_forget"_a, "gates"_a, "least"_a);
}

template <class Record> Record without_memory(Record record) {
  record.for_each_field([](const char *, auto &field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, TensorField>) field.allow_no_memory();
  });
  return record;
}

// Constructs a problem or a selection only for the checks of its constructor.
void bind_checks(nb::module_ &module) {
  module.def(
      "check_attention",
      [](nb::handle inputs, int32_t device_type) {
        const fdm_pack rules = rules_without_pack(device_type);
        Problem(rules, without_memory(read_record<AttentionRecord>(inputs)), {});
      },
      "inputs"_a, "device_type"_a);
  module.def(
      "check_selection",
      [](nb::handle inputs, int32_t device_type) {
        const fdm_pack rules = rules_without_pack(device_type);
        Selection(rules, without_memory(read_record<SelectionRecord>(inputs)), {});
      },
      "inputs"_a, "device_type"_a);
}

} // namespace

NB_MODULE(_core, module) {
  module.doc() = "Checks tensors, fills the structs of the C interface, and calls kernel packs.";
  // The loader keeps packs for the life of the process, so some exist when the interpreter ends.
  nb::set_leak_warnings(false);
  module.attr("PACK_ABI_VERSION") = FDM_PACK_ABI_VERSION;
  nb::exception<PackError>(module, "PackError", PyExc_RuntimeError);
  bind_pack(module);
  module.def("load_pack", [](std::string path) { return new Pack(std::move(path)); }, "path"_a);
  bind_problem(module);
  nb::class_<Allocator>(module, "Allocator")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), "empty_like"_a, "contiguous"_a,
           "float32"_a, "float64"_a, "uint8"_a);
  bind_call(module);
  bind_selection(module);
  bind_forgetting(module);
  bind_select(module);
  bind_forget(module);
  bind_checks(module);
  module.attr("ATTENTION_FIELDS") = field_names<AttentionRecord>();
  module.attr("SELECTION_FIELDS") = field_names<SelectionRecord>();
}
