# SPDX-License-Identifier: Apache-2.0
"""Models that can be pruned: one file per architecture, each a subclass of vLLM's own class."""

ARCHITECTURES = {
    "LlavaForConditionalGeneration": "anchorprune_vllm.models.llava:PrunedLlava",
}
"""vLLM's architecture name -> "module:class": strings, so that nothing is imported early."""
