// SPDX-License-Identifier: Apache-2.0
// Tensors of the device and of the host over the same memory, for the length of one operator.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.h"

namespace simcuda {

// The same memory as memory of the other side; it keeps the given storage alive.
inline c10::Storage storage_on(const at::Device& device, const c10::Storage& storage) {
  auto* memory = const_cast<void*>(storage.data());
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::Allocator* allocator = &device_memory;
  if (device.is_cpu()) allocator = c10::GetCPUAllocator();
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(memory, new c10::Storage(storage), release, device), allocator,
                      /*resizable=*/true);
}

// A tensor that looks as another does, in given memory.
inline at::Tensor tensor_like(const at::Tensor& t, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                       t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

inline at::Tensor host_alias(const at::Tensor& t) {
  return tensor_like(t, storage_on(at::Device(c10::DeviceType::CPU), t.storage()),
                     c10::DispatchKey::CPU);
}
inline at::Tensor device_alias(const at::Tensor& t) {
  return tensor_like(t, storage_on(the_device(), t.storage()), KEY);
}

// The tensors of one operator, so that each has one alias, and results that are views of arguments
// become views of them on the device.
class Aliases {
 public:
  at::Tensor to_host(const at::Tensor& t) {
    if (!is_on_device(t)) return t;
    for (auto& [on_device, on_host] : arguments_)
      if (on_device.is_same(t)) return on_host;
    auto& storage = host_storage_[t.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = storage_on(at::Device(c10::DeviceType::CPU), t.storage());
      device_storage_[storage.unsafeGetStorageImpl()] = t.storage();
    }
    arguments_.emplace_back(t, tensor_like(t, storage, c10::DispatchKey::CPU));
    return arguments_.back().second;
  }

  at::Tensor to_device(const at::Tensor& t) {
    if (!t.defined() || is_on_device(t)) return t;
    for (auto& [on_device, on_host] : arguments_)
      if (on_host.is_same(t)) return on_device;
    auto known = device_storage_.find(t.storage().unsafeGetStorageImpl());
    if (known == device_storage_.end()) return device_alias(t);
    return view_of(known->second, t);
  }

  // Give device tensors the sizes and the memory that an operator has given to their aliases:
  // in-place operators and `out=` may resize.
  void bring_back() {
    for (auto& [on_device, on_host] : arguments_) {
      auto* storage = on_device.storage().unsafeGetStorageImpl();
      if (on_host.storage().data() != storage->data()) {
        c10::Storage moved = storage_on(the_device(), on_host.storage());
        storage->set_nbytes(moved.nbytes());
        storage->set_data_ptr_noswap(
            std::move(moved.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      }
      if (on_device.sizes() != on_host.sizes() || on_device.strides() != on_host.strides() ||
          on_device.storage_offset() != on_host.storage_offset())
        on_device.unsafeGetTensorImpl()->set_sizes_and_strides(on_host.sizes(), on_host.strides(),
                                                               on_host.storage_offset());
    }
  }

 private:
  // A view has the keys of its base: InferenceMode asks for them.
  at::Tensor view_of(const c10::Storage& storage, const at::Tensor& t) {
    for (auto& [base, _] : arguments_) {
      if (base.storage().unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(storage), base.key_set(), t.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return view;
    }
    return tensor_like(t, storage, KEY);
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> arguments_;  // on the device, on the host
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storage_, device_storage_;
};

}  // namespace simcuda
