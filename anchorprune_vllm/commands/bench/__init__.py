# SPDX-License-Identifier: Apache-2.0
"""`anchorprune bench`: parts alone (`parts`), a server under load (`serve`, `questions`)."""
