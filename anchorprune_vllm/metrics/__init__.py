# SPDX-License-Identifier: Apache-2.0
"""What a server tells Prometheus: on vLLM's own `/metrics`, while a budget is given."""
