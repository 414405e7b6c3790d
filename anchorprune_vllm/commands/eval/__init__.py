# SPDX-License-Identifier: Apache-2.0
"""`anchorprune eval`: questions with known answers, asked at several budgets and methods."""
