# SPDX-License-Identifier: Apache-2.0
"""`anchorprune explain`: which visual tokens are kept for a question, and why, as a drawing."""
