# SPDX-License-Identifier: Apache-2.0
"""Which architectures of vLLM's can be pruned, how well, and what was tried."""
