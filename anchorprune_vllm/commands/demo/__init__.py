# SPDX-License-Identifier: Apache-2.0
"""`anchorprune demo`: a small model, served and asked at several budgets."""
