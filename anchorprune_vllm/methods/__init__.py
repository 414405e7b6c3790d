# SPDX-License-Identifier: Apache-2.0
"""The methods that choose tokens: `registry.py` knows their names, and each has a file."""
