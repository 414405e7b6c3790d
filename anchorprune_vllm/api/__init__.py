# SPDX-License-Identifier: Apache-2.0
"""The code of the API process: it reads requests and writes a plan for each image or video."""
