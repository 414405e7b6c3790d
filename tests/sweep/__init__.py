# SPDX-License-Identifier: Apache-2.0
"""A sweep over all tiny checkpoints: each is served by a real engine, unpruned and pruned."""
