// SPDX-License-Identifier: Apache-2.0
// The device's queue: copies from and to pinned memory, and events, that nobody has waited for yet.
//
// Until somebody waits, a copy to the host has not arrived: its destination holds nonsense. Pinned
// memory that is copied to the device, or that a kernel reads in place, is needed until then: if the
// host has overwritten it, that is an error.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "memory.h"
#include "waits.h"

namespace simcuda {

class Queue {
 public:
  // Both tensors are dense, and have the same strides.
  void copy_to_host(const at::Tensor& pinned, const at::Tensor& values) {
    auto* arriving = static_cast<const char*>(values.const_data_ptr());
    put({ARRIVING, pinned.storage(), pinned.mutable_data_ptr(),
         {arriving, arriving + values.nbytes()}});
    fill_with_nonsense(pinned.mutable_data_ptr(), pinned.nbytes());
  }
  // The device reads pinned memory, for a copy or by a kernel that uses it in place.
  void read_pinned(const at::Tensor& pinned) {
    auto* read = static_cast<char*>(pinned.mutable_data_ptr());
    const size_t bytes = at::detail::computeStorageNbytes(pinned.sizes(), pinned.strides(),
                                                          pinned.dtype().itemsize());
    put({READING, pinned.storage(), read, {read, read + bytes}});
  }
  // Returns the event's number: to wait for it is to wait for all that was put before it.
  long put_event() { return put({EVENT}); }

  bool has_done(long number) {
    std::lock_guard<std::mutex> guard(mutex_);
    return number <= done_;
  }

  // A kernel is about to change pinned memory itself, or has changed it: earlier readers need no
  // longer find in it what they read.
  void check_readers() {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& entry : waiting_)
      if (entry.kind == READING) entry.check();
  }
  void refresh_readers() {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& entry : waiting_)
      if (entry.kind == READING)
        std::memcpy(entry.values.data(), entry.pinned, entry.values.size());
  }

  void wait_for(long number) {
    std::vector<Entry> read;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      for (; done_ < number; ++done_, waiting_.pop_front()) {
        auto& entry = waiting_.front();
        if (entry.kind == ARRIVING)
          std::memcpy(entry.pinned, entry.values.data(), entry.values.size());
        else if (entry.kind == READING)
          read.push_back(std::move(entry));
      }
    }
    for (auto& entry : read) entry.check();
  }
  void wait_for_all() {
    long last;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      last = done_ + static_cast<long>(waiting_.size());
    }
    wait_for(last);
  }

 private:
  enum Kind { ARRIVING, READING, EVENT };
  struct Entry {
    Kind kind;
    c10::Storage storage = {};  // memory is not given back while the device uses it
    void* pinned = nullptr;
    std::vector<char> values = {};

    void check() const {
      TORCH_CHECK(!std::memcmp(pinned, values.data(), values.size()),
                  "a pinned tensor was overwritten before the device had read it: wait for an ",
                  "event after the copy or the kernel first, or use a fresh tensor");
    }
  };
  long put(Entry entry) {
    std::lock_guard<std::mutex> guard(mutex_);
    waiting_.push_back(std::move(entry));
    return done_ + static_cast<long>(waiting_.size());
  }

  std::mutex mutex_;
  std::deque<Entry> waiting_;
  long done_ = 0;
};

inline Queue& queue() {
  static auto& made = *new Queue;
  return made;
}

// Kernels that use pinned memory of the host in place, through an address on the device.
class PinnedArguments {
 public:
  void add(const at::Tensor& t) {
    if (is_on_device(t) && t.numel() && pinned_blocks().contains(t.const_data_ptr()))
      tensors_.push_back(t);
  }
  void before_kernel() const {
    if (!tensors_.empty()) queue().check_readers();
  }
  void after_kernel() const {
    if (!tensors_.empty()) queue().refresh_readers();
    for (auto& t : tensors_) queue().read_pinned(t);
  }

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace simcuda
