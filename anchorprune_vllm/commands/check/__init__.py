# SPDX-License-Identifier: Apache-2.0
"""`anchorprune check`: whether pruning works on this machine, part by part."""
