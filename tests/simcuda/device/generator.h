// SPDX-License-Identifier: Apache-2.0
// Random numbers of the device: drawn from a generator of the host that belongs to it.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "memory.h"

namespace simcuda {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator on_host)
      : GeneratorImpl(the_device(), c10::DispatchKeySet(KEY)), on_host_(std::move(on_host)) {}

  // The generator of the host that a kernel of the CPU can use.
  static at::Generator behind(const at::Generator& generator) {
    return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->on_host_;
  }

  void set_current_seed(uint64_t seed) override { on_host_.set_current_seed(seed); }
  uint64_t current_seed() const override { return on_host_.current_seed(); }
  uint64_t seed() override { return on_host_.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simcuda: generators have no offset"); }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "simcuda: generators have no offset");
  }
  void set_state(const c10::TensorImpl& state) override {
    on_host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(on_host_.clone()); }
  at::Generator on_host_;
};

inline at::Generator make_generator() {
  return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
}

// Without a generator of their own, operators draw from the host's default one.
inline const at::Generator& default_generator() {
  static auto& made = *new at::Generator(
      at::make_generator<DeviceGenerator>(at::detail::getDefaultCPUGenerator()));
  return made;
}

}  // namespace simcuda
