// SPDX-License-Identifier: Apache-2.0
// The device's memory and the host's pinned memory: both are ordinary memory of this process.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace simcuda {

constexpr auto KEY = c10::DispatchKey::CUDA;
constexpr size_t TOTAL_BYTES = size_t{8} << 30;
inline at::Device the_device() { return at::Device(c10::DeviceType::CUDA, 0); }
inline bool is_on_device(const at::Tensor& t) { return t.defined() && t.is_cuda(); }

// Fill memory with values that nobody can mistake for results: NaN as bfloat16, float16, float32
// and float64; as int32 and int64 numbers so large that an index made of them is out of range.
inline void fill_with_nonsense(void* memory, size_t bytes) {
  constexpr uint16_t NONSENSE = 0x7FFE;
  auto* out = static_cast<unsigned char*>(memory);
  for (size_t i = 0; i < bytes; ++i) out[i] = (NONSENSE >> (8 * (i % 2))) & 0xFF;
}

// Blocks of memory by their address.
class Blocks {
 public:
  void* allocate(size_t bytes) {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 256, bytes) == 0, "out of memory: ", bytes, " bytes");
    fill_with_nonsense(memory, bytes);
    std::lock_guard<std::mutex> guard(mutex_);
    sizes_[static_cast<char*>(memory)] = bytes;
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return memory;
  }
  void release(void* memory) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto block = sizes_.find(static_cast<char*>(memory));
      used_ -= block->second;
      sizes_.erase(block);
    }
    std::free(memory);
  }
  bool contains(const void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto* address = static_cast<char*>(const_cast<void*>(pointer));
    auto after = sizes_.upper_bound(address);
    if (after == sizes_.begin()) return false;
    auto& [begin, bytes] = *std::prev(after);
    return address < begin + bytes;
  }
  size_t used() {
    std::lock_guard<std::mutex> guard(mutex_);
    return used_;
  }
  size_t peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    return peak_;
  }
  void reset_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_ = used_;
  }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> sizes_;
  size_t used_ = 0, peak_ = 0;
};

// Never destroyed: tensors may outlive static variables.
inline Blocks& device_blocks() {
  static auto& made = *new Blocks;
  return made;
}
inline Blocks& pinned_blocks() {
  static auto& made = *new Blocks;
  return made;
}

// Hands out blocks as memory of one kind of device.
template <Blocks& blocks(), c10::DeviceType type>
struct BlockAllocator final : c10::Allocator {
  static void release(void* memory) {
    if (memory) blocks().release(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = type == c10::DeviceType::CUDA ? the_device() : at::Device(type);
    void* memory = bytes ? blocks().allocate(bytes) : nullptr;
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

inline BlockAllocator<device_blocks, c10::DeviceType::CUDA> device_memory;
inline BlockAllocator<pinned_blocks, c10::DeviceType::CPU> pinned_memory;

}  // namespace simcuda
