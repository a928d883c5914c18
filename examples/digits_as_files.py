"""scikit-learn's 1,797 handwritten digits as JPEG files, to try the examples that read images.

`python -m examples.digits_as_files FOLDER [SIDE]` writes FOLDER/train and FOLDER/test, each with a folder for each digit;
the longer side of an image has SIDE pixels, 256 if nothing is said.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write(folder: str, side: int = 256, rows: int | None = None) -> None:
    """Writes the digits, or the first of them; of every five the last is for tests."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    for number, (pixels, label) in enumerate(zip(digits.images[:rows], digits.target, strict=False)):
        place = Path(folder, "test" if number % 5 == 4 else "train", str(label))
        place.mkdir(parents=True, exist_ok=True)
        size = (side, int(side * rng.uniform(0.75, 1)))  # as photographs, they are not square
        image = Image.fromarray((pixels * 15.9).astype(np.uint8)).convert("RGB")
        image.resize(size if number % 2 else size[::-1]).save(place / f"{number:04}.jpg")


if __name__ == "__main__":
    write(sys.argv[1], *map(int, sys.argv[2:]))
