# SPDX-License-Identifier: Apache-2.0
"""The words of questions and answers that the demo's tokenizers would else cut into pieces."""

WORDS = (
    "is what does the a an not no image contain present shape color teal rectangle letter "
    "A B C E H T cross ring diamond heart moon star sign say left of there"
)
ANSWERS = "yes red green blue yellow black gray brown orange purple pink white circle triangle"
"""These the tokenizers know inside a text, but not yet as its first word."""
