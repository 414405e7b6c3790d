# SPDX-License-Identifier: Apache-2.0
"""A soak: thousands of mixed requests to one warm engine must equal their cold answers."""
