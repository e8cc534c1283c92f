"""Names for the values whose structure a type checker cannot follow.

Each stands for `Any`; it tells the reader which kind of value to expect. Use `Any` itself only
where neither these names nor a real type fits.
"""

from typing import Any, TypeAlias

# Nested containers that `jax.tree.map` walks; the leaves are arrays, shapes, shardings or specs.
PyTree: TypeAlias = Any
# What `json.loads` returns and `json.dumps` takes.
Json: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Any]
