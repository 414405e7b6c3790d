# SPDX-License-Identifier: Apache-2.0
"""What tests and commands need to try pruning without a GPU or a network."""
