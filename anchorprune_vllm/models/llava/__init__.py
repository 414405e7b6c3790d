# SPDX-License-Identifier: Apache-2.0
"""The LLaVAs, whose relevance comes from a CLIP or SigLIP pair: text tower and vision tower."""
