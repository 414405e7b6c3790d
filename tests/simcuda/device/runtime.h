// SPDX-License-Identifier: Apache-2.0
// The device as torch asks for it: one device with one stream, events, and CUDA's hooks.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generator.h"
#include "memory.h"
#include "queue.h"

namespace simcuda {

// Done when the host has waited for it, or for something after it, or asks for the third time.
struct Event {
  long number;
  int times_asked = 0;

  bool query() {
    if (++times_asked > 2) queue().wait_for(number);
    return queue().has_done(number);
  }
};

inline void wait_for_device() {
  report("synchronize", "device");
  queue().wait_for_all();
}

inline c10::Stream the_stream() { return c10::Stream(c10::Stream::DEFAULT, the_device()); }

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return c10::DeviceType::CUDA; }
  at::Device exchangeDevice(at::Device) const override { return the_device(); }
  at::Device getDevice() const override { return the_device(); }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  at::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(at::Device) const override { return the_stream(); }
  c10::Stream getDefaultStream(at::Device) const override { return the_stream(); }
  c10::Stream getNewStream(at::Device, int) const override { return the_stream(); }
  c10::Stream getStreamFromGlobalPool(at::Device, bool) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return the_stream(); }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream&) const override {
    // Torch's mode for finding waits notices streams that are waited for, but no events.
    report_noticed("synchronize", "stream");
    queue().wait_for_all();
  }
  void synchronizeDevice(const at::DeviceIndex) const override { wait_for_device(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const at::DeviceIndex,
              const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event{queue().put_event()};
  }
  void destroyEvent(void* event, const at::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    return !event || static_cast<Event*>(event)->query();
  }
  void synchronizeEvent(void* event) const override {
    report("synchronize", "event");
    if (event) queue().wait_for(static_cast<Event*>(event)->number);
  }
  double elapsedTime(void*, void*, const at::DeviceIndex) const override { return 0.5; }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return the_device(); }
  bool isPinnedPtr(const void* pointer) const override { return pinned_blocks().contains(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(at::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return make_generator(); }
  void deviceSynchronize(at::DeviceIndex) const override { wait_for_device(); }
};

}  // namespace simcuda
