// SPDX-License-Identifier: BSD-3-Clause
//
// The records of calls. Python declares them (AttentionInputs and SelectionInputs of record.py) and passes them
// whole. for_each_field lists the fields in the order and with the names of that declaration, and the reader follows
// this list. A test compares the two lists.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "tensor.h"

namespace fdm {

namespace nb = nanobind;

// The sequence boundaries of a packed call: both, or None and None.
struct CuSeqlens {
  TensorField q, k;
};

// Fields that are passed by name have these defaults; tensors default to None.
struct AttentionRecord {
  TensorField query, key, value, mask, start, end, bias;
  CuSeqlens cu_seqlens;
  TensorField block_table, given_plan, sink;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0, max_kept = 0;
  int64_t window = -1, keep_last = 0, keep_first = 0;
  double scale = 1, softcap = 0;
  bool causal = false, deterministic = false, keeps_runs = false;

  template <class Visit> void for_each_field(Visit &&visit) {
    visit("query", query);
    visit("key", key);
    visit("value", value);
    visit("mask", mask);
    visit("start", start);
    visit("end", end);
    visit("bias", bias);
    visit("cu_seqlens_q", cu_seqlens.q);
    visit("cu_seqlens_k", cu_seqlens.k);
    visit("block_table", block_table);
    visit("given_plan", given_plan);
    visit("sink", sink);
    visit("max_seqlen_q", max_seqlen_q);
    visit("max_seqlen_k", max_seqlen_k);
    visit("scale", scale);
    visit("causal", causal);
    visit("softcap", softcap);
    visit("deterministic", deterministic);
    visit("max_kept", max_kept);
    visit("window", window);
    visit("keep_last", keep_last);
    visit("keep_first", keep_first);
    visit("keeps_runs", keeps_runs);
  }
};

struct SelectionRecord {
  TensorField bias, mask;
  CuSeqlens cu_seqlens;
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, window = 0;
  int64_t keep_last = 0, keep_first = 0;
  bool causal = false;

  template <class Visit> void for_each_field(Visit &&visit) {
    visit("bias", bias);
    visit("mask", mask);
    visit("cu_seqlens_q", cu_seqlens.q);
    visit("cu_seqlens_k", cu_seqlens.k);
    visit("batch", batch);
    visit("heads", heads);
    visit("kv_heads", kv_heads);
    visit("queries", queries);
    visit("keys", keys);
    visit("window", window);
    visit("causal", causal);
    visit("keep_last", keep_last);
    visit("keep_first", keep_first);
  }
};

// The settings of a call from outside its record: threads of cpu packs, the stream of GPU packs.
struct Execution {
  int32_t threads = 1;
  uintptr_t stream = 0;
};

// Reads a record from a tuple of all its fields. Raises TypeError for another number of fields, or a value of another
// type.
template <class Record> Record read_record(nb::handle tuple);

// Reads a record from its first fields by position and the others by name.
template <class Record> Record read_record(const nb::args &positional, const nb::kwargs &named);

// A tuple of the record's fields, in order.
template <class Record> nb::tuple as_tuple(Record &record);

// The names of a record's fields, in order.
template <class Record> nb::tuple field_names();

} // namespace fdm
