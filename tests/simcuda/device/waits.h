// SPDX-License-Identifier: Apache-2.0
// Tells Python whenever the host waits for the device.
#pragma once
#include <c10/util/Exception.h>

#include <atomic>
#include <string>

namespace simcuda {

// Kinds of waits:
//   "read"         the host needs a value or a size that the device computes
//   "copy"         a copy that blocks
//   "silent"       CUDA may wait, but torch.cuda.set_sync_debug_mode does not notice
//   "synchronize"  an event, a stream or the device was waited for by name
using Listener = void (*)(const char* kind, const char* what);
inline std::atomic<Listener> listener{nullptr};

// Of torch.cuda.set_sync_debug_mode.
enum SyncDebugMode { IGNORE = 0, WARN = 1, RAISE = 2 };
inline std::atomic<int> sync_debug_mode{IGNORE};

inline void report(const char* kind, const std::string& what) {
  if (Listener listen = listener.load()) listen(kind, what.c_str());
}

// Report a wait that CUDA builds of torch notice by themselves, in their words.
inline void report_noticed(const char* kind, const std::string& what) {
  report(kind, what);
  TORCH_CHECK(sync_debug_mode != RAISE, "called a synchronizing CUDA operation");
  if (sync_debug_mode == WARN) TORCH_WARN("called a synchronizing CUDA operation");
}

}  // namespace simcuda
