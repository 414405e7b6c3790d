// SPDX-License-Identifier: Apache-2.0
// The one kernel of the device: it runs the CPU's kernel on aliases of the same memory.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "aliases.h"
#include "generator.h"
#include "rules.h"

namespace simcuda {

// Replace each tensor in a value: a tensor, or one of the lists that operators take.
template <typename Replace>
void replace_tensors(c10::IValue& value, Replace replace) {
  if (value.isTensor()) {
    value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> replaced;
    for (const at::Tensor& t : value.toTensorVector()) replaced.push_back(replace(t));
    value = replaced;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> replaced;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      replaced.push_back(t ? std::optional<at::Tensor>(replace(*t)) : t);
    value = replaced;
  }
}

// Look at one tensor of a call before it runs.
inline void note(const at::Tensor& t, bool is_index, bool is_written, Arguments& given) {
  if (!t.defined()) return;
  if (is_on_device(t)) {
    given.on_device.push_back(t);
    if (is_index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte))
      given.has_device_mask = true;
  } else if (is_index) {
    given.has_host_indices = true;
  } else if (is_written) {
    given.written_on_host.push_back(t);
  } else if (t.dim()) {
    given.on_host.push_back(t);
  } else if (!t.unsafeGetTensorImpl()->is_wrapped_number()) {  // `x * 2` makes a tensor of 2
    given.host_numbers.push_back(t);
  }
}

// Whether an operator returns a view of an argument: such a one reads no memory.
inline bool makes_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  const auto* alias = schema.returns()[0].alias_info();
  return alias && !alias->isWrite();
}

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();

  // 1. What CUDA would check or wait for.
  Arguments given;
  PinnedArguments pinned;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool is_written = alias && alias->isWrite();
    const bool is_index = takes_indices(schema.name()) && value.isOptionalTensorList();
    replace_tensors(value, [&](const at::Tensor& t) {
      note(t, is_index, is_written, given);
      if (!makes_view(schema)) pinned.add(t);
      return t;
    });
    if (value.isGenerator() && value.toGenerator().device().is_cpu())
      given.has_host_generator = true;
  }
  check_devices(op, given);
  check_dtypes(schema.name(), given);
  pinned.before_kernel();
  report_waits(schema.name(), torch::jit::last(*stack, schema.arguments().size()), given);

  // 2. The same call on the host.
  Aliases aliases;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    replace_tensors(value, [&](const at::Tensor& t) { return aliases.to_host(t); });
    if (value.isDevice() && value.toDevice().is_cuda())
      value = at::Device(c10::DeviceType::CPU);
    else if (value.isGenerator())
      value = DeviceGenerator::behind(value.toGenerator());
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  pinned.after_kernel();

  // 3. Its results on the device.
  aliases.bring_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    replace_tensors((*stack)[i], [&](const at::Tensor& t) { return aliases.to_device(t); });
}

}  // namespace simcuda
