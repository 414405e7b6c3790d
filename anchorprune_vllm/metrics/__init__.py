# SPDX-License-Identifier: Apache-2.0
"""Metrics of pruning, which a server with a budget adds to vLLM's own `/metrics`."""
