"""Unsigned integers of any size, exact under jit. JAX has 64-bit integers only with `jax_enable_x64`.

A `BigUint` is a tuple of uint32 arrays of one shape, its words, the least significant first. The number of words is
static. With one word, which holds numbers below 2**32, everything here is plain uint32 arithmetic.

Products and quotients work on *half words*: 16 bits in a uint32, stacked along the first axis of an array.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BigUint = tuple[jax.Array, ...]
_HALF = np.uint32(0xFFFF)


def words_for(value: int) -> int:
    """Returns how many words a number needs."""
    return max(1, -(-value.bit_length() // 32))


def constant(value: int | Sequence[int], words: int) -> BigUint:
    """Returns a known integer >= 0, or a vector of such."""
    values = np.asarray(value, object)
    parts = [(values >> (32 * i)) & 0xFFFFFFFF for i in range(words)]
    return tuple(jnp.asarray(np.asarray(part, np.uint32)) for part in parts)


def from_word(word: jax.Array, words: int) -> BigUint:
    """Returns a number of one word, extended by zeros to this many words."""
    return (word, *[jnp.zeros_like(word)] * (words - 1))


def add(a: BigUint, b: BigUint) -> BigUint:
    """Returns a + b, of equally many words, without what exceeds them."""
    result = [a[0] + b[0]]
    carries = result[0] < a[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        result.append(x + y + carries.astype(jnp.uint32))
        carries = (result[-1] < x) | ((result[-1] == x) & carries)
    return tuple(result)


def subtract(a: BigUint, b: BigUint) -> BigUint:
    """Returns a - b for a >= b, of equally many words."""
    result = [a[0] - b[0]]
    borrows = a[0] < b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        result.append(x - y - borrows.astype(jnp.uint32))
        borrows = (x < y) | ((x == y) & borrows)
    return tuple(result)


def is_at_most(a: BigUint, b: BigUint) -> jax.Array:
    """Returns a <= b, of equally many words."""
    result = a[0] <= b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        result = (x < y) | ((x == y) & result)
    return result


def equals(a: BigUint, small: int) -> jax.Array:
    """Returns a == small, a number of one word."""
    result = a[0] == small
    for x in a[1:]:
        result = result & (x == 0)
    return result


def where(condition: jax.Array, a: BigUint, b: BigUint) -> BigUint:
    """Returns a where the condition is true, elsewhere b."""
    return tuple(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True))


def to_float(a: BigUint, dtype: Any) -> jax.Array:
    """Returns the number as a float, within 1 ulp."""
    result = a[-1].astype(dtype)
    for word in reversed(a[:-1]):
        result = result * 2.0**32 + word.astype(dtype)
    return result


def total(a: BigUint, axis: int) -> BigUint:
    """Returns the sum over an axis of fewer than 2**16 numbers."""
    if len(a) == 1:
        return (jnp.sum(a[0], axis=axis, dtype=jnp.uint32),)
    return from_halves(carried(jnp.sum(halves(a), axis=axis + 1, dtype=jnp.uint32)), len(a))


def halves(a: BigUint) -> jax.Array:
    """Returns the half words of a number, of shape (2 * words, ...)."""
    return jnp.stack([half for word in a for half in (word & _HALF, word >> 16)])


def from_halves(digits: jax.Array, words: int) -> BigUint:
    """Returns the number of these half words, without what exceeds its words."""
    digits = jnp.concatenate([digits, jnp.zeros((2 * words, *digits.shape[1:]), jnp.uint32)])
    return tuple(digits[2 * i] | (digits[2 * i + 1] << 16) for i in range(words))


def carried(columns: jax.Array) -> jax.Array:
    """Returns the sum of column_i * 2**(16 i) in as many half words, for columns of up to 32 bits."""

    def step(carry: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        low = (column & _HALF) + (carry & _HALF)
        return (column >> 16) + (carry >> 16) + (low >> 16), low & _HALF

    return jax.lax.scan(step, jnp.zeros_like(columns[0]), columns)[1]


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a * b, all in half words."""
    columns = jnp.zeros((len(a) + len(b), *b.shape[1:]), jnp.uint32)
    for i, digit in enumerate(a):
        products = digit[None] * b
        columns = columns.at[i : i + len(b)].add(products & _HALF)
        columns = columns.at[i + 1 : i + 1 + len(b)].add(products >> 16)
    return carried(columns)


def divide(a: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Returns a // divisor and a % divisor, for a divisor of one half word."""

    def step(remainder: jax.Array, digit: jax.Array) -> tuple[jax.Array, jax.Array]:
        partial = (remainder << 16) | digit
        return partial % np.uint32(divisor), partial // np.uint32(divisor)

    remainder, quotient = jax.lax.scan(step, jnp.zeros_like(a[0]), a, reverse=True)
    return quotient, remainder
