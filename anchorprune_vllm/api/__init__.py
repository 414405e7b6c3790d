# SPDX-License-Identifier: Apache-2.0
"""What runs in the API process: it reads requests, and writes the plan of each item."""
