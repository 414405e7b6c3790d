# SPDX-License-Identifier: Apache-2.0
"""The code of the engine core: it counts the vision tower's work for the scheduler."""
