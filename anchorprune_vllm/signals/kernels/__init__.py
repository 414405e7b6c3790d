# SPDX-License-Identifier: Apache-2.0
"""Forms of signals for one kind of device; each gives what the form in torch does."""
