# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL on the general adapter, for vLLM to find by name, with or without a budget."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from anchorprune_vllm.models.families.qwen import Qwen2_5
from anchorprune_vllm.models.general.adapter import generalize

PrunedQwen = generalize(Qwen2_5_VLForConditionalGeneration, Qwen2_5, has_mrope=True)
