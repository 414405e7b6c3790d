# SPDX-License-Identifier: Apache-2.0
"""Tiny models, servers and media, to try pruning without a GPU or a network."""
