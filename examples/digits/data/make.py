#!/usr/bin/env python3
"""Writes digits.txt from the copy of the data set that scikit-learn carries (pip install scikit-learn).

One line a digit: 64 pixels, row by row, each one character from 0 (white) to G (16, black), a space, and the digit.
"""

from pathlib import Path

from sklearn.datasets import load_digits

SCALE = "0123456789ABCDEFG"

digits = load_digits()
lines = (
    "".join(SCALE[int(pixel)] for pixel in pixels) + f" {label}\n" for pixels, label in zip(digits.data, digits.target)
)
Path(__file__).with_name("digits.txt").write_text("".join(lines))
