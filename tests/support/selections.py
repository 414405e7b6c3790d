# SPDX-License-Identifier: Apache-2.0
"""A look at what a pruner's method is given, and what it gives back."""

from anchorprune_vllm.testing.selections import record_selections, recorded_selections

__all__ = ["record_selections", "recorded_selections"]
