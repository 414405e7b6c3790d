# SPDX-License-Identifier: Apache-2.0
"""Writers of the five demo models; the two trained ones come as files."""
