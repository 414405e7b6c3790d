# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that is not there, for rehearsals on a machine without a GPU.

A CPU build of torch has no CUDA kernels, so a small C++ library (`device/`) can take their place.
It runs the CPU's kernel on the same memory, after checking what CUDA would check. Tensors are plain
tensors on `cuda:0`, and code that asks for `device.type == "cuda"` takes its real branch. On it
vLLM's own CUDA platform, GPU worker and both GPU model runners run, and Triton's kernels in
Triton's interpreter.

It is as strict as CUDA, or stricter: `test_device.py` breaks each rule on purpose.

What it cannot show: speed, real memory, CUDA graphs, torch.compile, several streams at once, NCCL,
numerics of half precision, and compiled Triton.

A process gets the device through its environment (`environment.py`), and so do its children; pytest
gets it with `-p tests.simcuda.pytest_plugin`.
"""
