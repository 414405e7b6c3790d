# SPDX-License-Identifier: Apache-2.0
"""The LLaVA models, whose relevance comes from the text and vision towers of CLIP or SigLIP."""
