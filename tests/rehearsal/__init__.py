# SPDX-License-Identifier: Apache-2.0
"""A rehearsal: vLLM's CUDA platform, GPU worker and both GPU runners, on a simulated device.

Each engine runs in a process of its own (`program.py`), which asks it the same things on simulated
CUDA and on vLLM's CPU platform, and writes down what it saw (`report.py`). The tests compare.
"""
