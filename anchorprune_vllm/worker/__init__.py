# SPDX-License-Identifier: Apache-2.0
"""The code of the worker: it embeds media by their plans, and gives kept tokens their positions."""
