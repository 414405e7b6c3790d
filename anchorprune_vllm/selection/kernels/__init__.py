# SPDX-License-Identifier: Apache-2.0
"""Forms of the greedy loop for one kind of device; each chooses exactly what `expand.py` does."""
