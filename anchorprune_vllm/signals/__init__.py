# SPDX-License-Identifier: Apache-2.0
"""Relevance, importance and features of visual tokens. Torch and transformers only: no vLLM."""
