# SPDX-License-Identifier: Apache-2.0
"""The methods that choose tokens, a file each; `registry.py` finds them by name."""
