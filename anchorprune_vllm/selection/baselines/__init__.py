# SPDX-License-Identifier: Apache-2.0
"""Published selectors, each a rule of its authors on the signals that AnchorPrune has.

K is the total for an image or video, for every method, and all its tokens compete. Where the
original uses a signal that is not there (another layer, the [CLS] token itself), the file says so.
"""
