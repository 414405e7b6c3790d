// SPDX-License-Identifier: Apache-2.0
// The device's queue: copies from and to pinned memory, and events, that nobody has waited for yet.
//
// Until somebody waits, a copy to the host has not arrived: its destination holds nonsense. A copy
// to the device needs its source until then: one that has been overwritten is an error.
#pragma once
#include <ATen/ATen.h>

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
  void copy_to_device(const at::Tensor& pinned) {
    auto* leaving = static_cast<char*>(pinned.mutable_data_ptr());
    put({LEAVING, pinned.storage(), leaving, {leaving, leaving + pinned.nbytes()}});
  }
  // Returns the event's number: to wait for it is to wait for all that was put before it.
  long put_event() { return put({EVENT}); }

  bool has_done(long number) {
    std::lock_guard<std::mutex> guard(mutex_);
    return number <= done_;
  }

  void wait_for(long number) {
    std::vector<Entry> copied;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      for (; done_ < number; ++done_, waiting_.pop_front()) {
        auto& entry = waiting_.front();
        if (entry.kind == ARRIVING)
          std::memcpy(entry.pinned, entry.values.data(), entry.values.size());
        else if (entry.kind == LEAVING)
          copied.push_back(std::move(entry));
      }
    }
    for (auto& entry : copied)
      TORCH_CHECK(
          !std::memcmp(entry.pinned, entry.values.data(), entry.values.size()),
          "a pinned tensor was overwritten while a non_blocking copy to the device was reading it: "
          "wait for an event after the copy first, or copy from a fresh tensor");
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
  enum Kind { ARRIVING, LEAVING, EVENT };
  struct Entry {
    Kind kind;
    c10::Storage storage = {};  // memory is not given back while a copy uses it
    void* pinned = nullptr;
    std::vector<char> values = {};
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

}  // namespace simcuda
