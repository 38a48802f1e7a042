"""What a step of parameters that no device can hold takes on eight H100s: the code of `docs/guide/large_models.md`.

    python -m pip install -e '.[gpu-compiler]' && python examples/benchmarks/large_models.py

It runs the page's definitions with larger shapes, compiles the step for each way, and reads from the programs what a
device holds beside parameters, state and batch, and what crosses the network. Unit: the bytes of all parameters.
"""

import math
import pathlib
import re
from collections import Counter
from typing import Any

import _compiled
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "large_models.md"
LAYERS, WIDTH, HIDDEN, VOCABULARY, EXAMPLES, TOKENS = 8, 1024, 4096, 1024, 32, 128
SHAPES = {
    "embedding": (VOCABULARY, WIDTH),
    "layers": {
        "in": (LAYERS, WIDTH, WIDTH),
        "mix": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    },
    "head": (WIDTH, VOCABULARY),
}
WAYS = {"A": "around", "B": "whole", "C": "inner"}


def page_definitions() -> dict[str, Any]:
    """Runs the page's code without its last lines, which train a small model on the devices that are here."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec("".join(blocks).split("\nshapes = ")[0], names)
    return names


def main() -> None:
    """Prints a row for each way."""
    names = page_definitions()
    mesh = _compiled.Target("h100").mesh(8)

    def array(shape: tuple[int, ...], spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(array, SHAPES, names["specs"], is_leaf=lambda x: isinstance(x, tuple))
    size = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(params))
    tokens = array((EXAMPLES, TOKENS), jax.P("data"), jnp.int32)
    shardings = {(x.shape, x.dtype): x.sharding for x in jax.tree.leaves(params)}
    opt_state = jax.tree.map(
        lambda x: array(
            x.shape, getattr(shardings.get((x.shape, x.dtype)), "spec", jax.P()), x.dtype
        ),
        jax.eval_shape(names["tx"].init, params),
    )
    print(f"{size / 4e6:.0f} million parameters; in multiples of their bytes:")
    for way, name in WAYS.items():
        with jax.set_mesh(mesh):
            step = names["step_of"](names[name])
            traced = step.trace(params, opt_state, tokens, tokens)
            compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        program = _compiled.Program(compiled, size, 8, 0.0)
        crossing: Counter[str] = Counter()
        for x, _, times in program.steps(closing=True):
            for operation, sent in program._collectives(x):
                if sent > 1e4:
                    crossing[operation] += sent * times / size
        row = "  ".join(f"{k} {v:.2f}" for k, v in sorted(crossing.items()))
        print(f"{way} ({name}): temporaries {program.temporary:.2f}  {row}", flush=True)


if __name__ == "__main__":
    main()
