# SPDX-License-Identifier: Apache-2.0
"""Relevance, importance and features of visual tokens; needs torch and transformers, not vLLM."""
