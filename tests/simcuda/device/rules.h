// SPDX-License-Identifier: Apache-2.0
// What CUDA refuses and what it waits for, where a CPU does neither.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <string>
#include <unordered_set>

#include "queue.h"
#include "waits.h"

namespace simcuda {

using Names = std::unordered_set<std::string>;

// Their CUDA kernels know floating point alone.
inline const Names& FLOAT_ONLY = *new Names{
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv", "aten::dot", "aten::vdot", "aten::convolution",
    "aten::avg_pool2d", "aten::avg_pool3d", "aten::upsample_bilinear2d",
    "aten::upsample_bicubic2d", "aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa"};

// Not pointwise, but they take a number as a tensor of the host.
inline const Names& TAKES_HOST_NUMBERS = *new Names{
    "aten::fill_", "aten::masked_fill_", "aten::index_fill_", "aten::_index_put_impl_"};

// The host has to know a result, or its size, before it goes on.
inline const Names& READS = *new Names{
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::bincount", "aten::histc", "aten::multinomial",
    "aten::is_nonzero", "aten::allclose"};

// The arguments of one call, as the rules see them.
struct Arguments {
  std::vector<at::Tensor> on_device, on_host, host_numbers, written_on_host;
  bool has_device_mask = false, has_host_indices = false, has_host_generator = false;
};

inline bool takes_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::_index_put_impl_";
}

inline void check_devices(const c10::OperatorHandle& op, const Arguments& given) {
  TORCH_CHECK(!given.has_host_generator,
              "Expected a 'cuda' device type for generator but found 'cpu'");
  if (given.on_device.empty()) return;
  const auto& name = op.schema().name();
  const bool takes_numbers =
      op.hasTag(at::Tag::pointwise) || TAKES_HOST_NUMBERS.count(name);
  auto refuse = [&](const at::Tensor& t) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two ",
                "devices, cuda:0 and cpu! (", name, " was given a tensor of the host, of sizes ",
                t.sizes(), ")");
  };
  for (auto& t : given.on_host) refuse(t);
  for (auto& t : given.written_on_host) refuse(t);
  if (!takes_numbers)
    for (auto& t : given.host_numbers) refuse(t);
}

inline void check_dtypes(const std::string& name, const Arguments& given) {
  if (!FLOAT_ONLY.count(name)) return;
  for (auto& t : given.on_device)
    TORCH_CHECK(!at::isIntegralType(t.scalar_type(), /*includeBool=*/true), '"', name,
                "_cuda\" not implemented for '", t.scalar_type(), "'");
}

// Large sets are compared by sorting, for which duplicates are taken out first.
inline bool isin_sorts(c10::ArrayRef<c10::IValue> arguments) {
  if (!arguments[0].isTensor() || !arguments[1].isTensor()) return false;
  const double elements = arguments[0].toTensor().numel(), tested = arguments[1].toTensor().numel();
  const bool assume_unique = arguments[2].toBool();
  return tested >= 10 * std::pow(elements, 0.145) && !assume_unique;
}

inline void report_waits(const std::string& name, c10::ArrayRef<c10::IValue> arguments,
                         const Arguments& given) {
  const bool has_unknown_size = name == "aten::repeat_interleave" && arguments[1].isNone();
  const bool reads = READS.count(name) || given.has_device_mask || has_unknown_size ||
                     (name == "aten::isin" && isin_sorts(arguments));
  if (reads) {
    report_noticed("read", given.has_device_mask ? name + " with a mask" : name);
    queue().wait_for_all();
  }
  if (given.has_host_indices) report("silent", name + " with indices of the host");
}

}  // namespace simcuda
