# SPDX-License-Identifier: Apache-2.0
"""The adapter that prunes any image model of vLLM; `families/` tells it about single models."""
