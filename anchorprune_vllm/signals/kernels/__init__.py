# SPDX-License-Identifier: Apache-2.0
"""Signals computed by kernels for one kind of device, with the same results as in torch."""
