# SPDX-License-Identifier: Apache-2.0
"""The adapter that prunes any image model of vLLM's; `families/` tells it about single models."""
