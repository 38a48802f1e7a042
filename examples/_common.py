"""The examples' data, which comes with the installed packages, its order, and how measurements are fetched."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import jax
import numpy as np
from numpy.typing import NDArray


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Handwritten digits: train images, test images (each 8 x 8 x 1, in [0, 1]), train labels, test labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = (data.images[..., None] / 16).astype(np.float32)
    # The split does not follow the examples' --seed, so that accuracies compare.
    labels = data.target.astype(np.int32)
    return tuple(train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0))


def documentation() -> tuple[list[str], dict[str, int]]:
    """The texts of Python's own documentation, by topic, and the number of each character in them, from 0 on."""
    texts = [topics[name] for name in sorted(topics)]
    return texts, {character: code for code, character in enumerate(sorted(set("".join(texts))))}


def passages(rows: int, length: int, number: int, seed: int) -> Iterator[np.ndarray]:
    """Yields codes of shape (rows, length), int32: random passages of the documentation."""
    texts, alphabet = documentation()
    codes = np.array([alphabet[character] for text in texts for character in text], np.int32)
    rng = np.random.default_rng(seed)
    for _ in range(number):
        starts = rng.integers(len(codes) - length + 1, size=(rows, 1))
        yield codes[starts + np.arange(length)]


def shuffled_batches(
    examples: int, size: int, epochs: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Row numbers, newly shuffled in each epoch, whose last batch may be smaller."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(examples)
        yield from (order[start : start + size] for start in range(0, examples, size))


def columns(history: list[dict[str, jax.Array]]) -> dict[str, np.ndarray]:
    """Fetches the measurements of all steps from the device, and returns an array over the steps for each name."""
    fetched = jax.device_get(history)
    return {name: np.array([measured[name] for measured in fetched]) for name in fetched[0]}
