# SPDX-License-Identifier: Apache-2.0
"""`anchorprune models`: which of vLLM's architectures can be pruned, and how each was tested."""
