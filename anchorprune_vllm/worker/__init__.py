# SPDX-License-Identifier: Apache-2.0
"""What runs in the worker: it embeds media by their plans, and places what is kept."""
