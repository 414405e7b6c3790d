// SPDX-License-Identifier: Apache-2.0
// A CUDA device that is not there: it stands on the CUDA dispatch key of a CPU build of torch, which
// has no kernels of its own for it.
//
// Tensors are plain tensors on cuda:0, their memory is the host's, and every operator is the CPU's.
//   waits.h      tells Python when the host waits for the device
//   memory.h     the device's memory and pinned memory
//   queue.h      copies and events that nobody has waited for
//   aliases.h    the same memory as a tensor of the device and of the host
//   rules.h      what CUDA refuses, and what it waits for
//   kernel.h     the one kernel that runs every operator
//   tensors.h    the few operators that need one of their own
//   generator.h  random numbers
//   runtime.h    device, stream, events and hooks, as torch asks for them
#include <torch/library.h>

#include "kernel.h"
#include "runtime.h"
#include "tensors.h"

C10_REGISTER_GUARD_IMPL(CUDA, simcuda::DeviceGuard)

namespace at {
using CUDAHooks = simcuda::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

static const bool has_memory = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &simcuda::device_memory, /*priority=*/255);
  return true;
}();

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simcuda::run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", simcuda::empty);
  library.impl("empty_strided", simcuda::empty_strided);
  library.impl("copy_", simcuda::copy_);
  library.impl("resize_", simcuda::resize_);
  library.impl("set_.source_Storage_storage_offset", simcuda::set_storage);
  library.impl("set_.source_Storage", simcuda::set_whole_storage);
  library.impl("set_.source_Tensor", simcuda::set_tensor);
  library.impl("record_stream", simcuda::record_stream);
  // Torch would choose a kernel for these by the device's type.
  for (auto* name : {"convolution", "_convolution", "native_group_norm",
                     "_scaled_dot_product_attention_math"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&simcuda::run_on_host>());
}

TORCH_LIBRARY(simcuda, library) {
  library.def("host_alias(Tensor(a) device_tensor) -> Tensor(a)", simcuda::host_alias);
  library.def("before_kernel(Tensor[] arguments) -> ()", [](at::TensorList arguments) {
    simcuda::PinnedArguments pinned;
    for (auto& t : arguments) pinned.add(t);
    pinned.before_kernel();
  });
  library.def("after_kernel(Tensor[] arguments) -> ()", [](at::TensorList arguments) {
    simcuda::PinnedArguments pinned;
    for (auto& t : arguments) pinned.add(t);
    pinned.after_kernel();
  });
}

// An operator that vLLM's CUDA library has and its CPU library lacks.
TORCH_LIBRARY_FRAGMENT(_C, library) {
  library.def("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor");
  library.impl("get_cuda_view_from_cpu_tensor", c10::DispatchKey::CPU,
               simcuda::device_view_of_pinned);
}

// What Python calls through ctypes.
extern "C" {
void simcuda_listen(simcuda::Listener listener) { simcuda::listener = listener; }
void simcuda_set_sync_debug_mode(int mode) { simcuda::sync_debug_mode = mode; }
int simcuda_get_sync_debug_mode() { return simcuda::sync_debug_mode; }
size_t simcuda_total_bytes() { return simcuda::TOTAL_BYTES; }
size_t simcuda_used_bytes() { return simcuda::device_blocks().used(); }
size_t simcuda_peak_bytes() { return simcuda::device_blocks().peak(); }
void simcuda_reset_peak() { simcuda::device_blocks().reset_peak(); }
}
