"""Where only the wheel given as the argument is installed: what it holds, its page, and a training step."""

import re
import sys
import zipfile

import jax
import jax.numpy as jnp
import optax

import shrewjax

(wheel,) = sys.argv[1:]
tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
assert tops == {"shrewjax", f"shrewjax-{shrewjax.__version__}.dist-info"}, tops
with zipfile.ZipFile(wheel) as archive:
    page = archive.read(f"shrewjax-{shrewjax.__version__}.dist-info/METADATA").decode()
relative = re.findall(r'(?:\]\(|src="|srcset=")(?!https://)[^)"]*', page)
assert not relative, f"a package index has no such page: {relative}"
assert "site-packages" in shrewjax.__file__, shrewjax.__file__

tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(1.0), optax.sgd(0.5)), 2)
step = jax.jit(lambda params, state, grads: shrewjax.apply_gradients(tx, grads, state, params))
params = jnp.zeros(2)
state = tx.init(params)
for _ in range(2):
    params, state = step(params, state, jnp.array([3.0, 4.0]))
assert jnp.allclose(params, jnp.array([-0.3, -0.4])), params
print(f"{wheel}: installs alone, trains, holds no more than the package")
