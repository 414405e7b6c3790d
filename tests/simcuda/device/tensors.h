// SPDX-License-Identifier: Apache-2.0
// The operators that need to know about memory: making, copying, resizing and replacing tensors.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include "aliases.h"
#include "queue.h"
#include "waits.h"

namespace simcuda {

inline at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device>,
                        std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(KEY), at::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(KEY), at::dtype_or_default(dtype));
}

// Whether a copy can go from or to this memory of the host while the host does something else.
// Conversion and repetition of what goes to the device are done in other, pageable memory.
inline bool can_be_asynchronous(const at::Tensor& to, const at::Tensor& from) {
  const auto& host = is_on_device(to) ? from : to;
  return host.is_pinned() && host.is_non_overlapping_and_dense() && to.sizes() == from.sizes() &&
         (is_on_device(from) || to.scalar_type() == from.scalar_type());
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool crosses = is_on_device(self) != is_on_device(source) && source.numel();
  const bool is_asynchronous = crosses && non_blocking && can_be_asynchronous(self, source);
  const bool to_host = crosses && is_on_device(source);
  if (crosses && !is_asynchronous) {
    if (non_blocking)
      report("silent", to_host ? "non_blocking copy to pageable or gapped memory"
                               : "non_blocking copy from pageable or gapped memory");
    else
      report_noticed("copy", to_host ? "blocking copy to the host" : "blocking copy to the device");
    if (to_host || !non_blocking) queue().wait_for_all();
  }

  Aliases aliases;
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor to = aliases.to_host(self), from = aliases.to_host(source);
  if (is_asynchronous && to_host) {
    queue().copy_to_host(to, at::empty_strided(to.sizes(), to.strides(), to.dtype()).copy_(from));
    return self;
  }
  if (is_asynchronous) queue().read_pinned(from);
  PinnedArguments pinned;
  pinned.add(self);
  pinned.add(source);
  pinned.before_kernel();
  to.copy_(from);
  pinned.after_kernel();
  return self;
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                                 std::optional<at::MemoryFormat> format) {
  Aliases aliases;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    aliases.to_host(self).resize_(C10_AS_INTARRAYREF_SLOW(size), format);
  }
  aliases.bring_back();
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, c10::SymInt offset,
                               c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(storage.device().is_cuda(), "Attempted to set the storage of a tensor on device ",
              "\"cuda:0\" to a storage on different device \"", storage.device(), '"');
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_storage_keep_dtype(storage);
  if (sizes.empty() || !stride.empty()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

inline at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const c10::SymInt elements = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {elements}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

inline void record_stream(at::Tensor&, c10::Stream) {}  // memory is given back when it is unused

// vLLM's operator over unified addresses: memory of the host as the device sees it.
inline at::Tensor device_view_of_pinned(const at::Tensor& t) {
  TORCH_CHECK(t.device().is_cpu() && (t.is_pinned() || !t.numel()),
              "the device sees pinned memory of the host alone");
  return device_alias(t);
}

}  // namespace simcuda
