# SPDX-License-Identifier: Apache-2.0
"""What runs in the engine core: it counts the vision tower's work for the scheduler."""
