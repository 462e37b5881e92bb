"""The audit as users call it: `jmpx.inspect.audit(fn)(*args)`."""

import functools
from collections.abc import Callable

from jmpx._inspect.audit import summary
from jmpx._inspect.audit.report import Audit
from jmpx._inspect.audit.trying import tried
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}


def audit(fn: Callable[..., object], *, platform: str | None = None) -> Callable[..., Audit]:
    """Shows which operations of a train step run in which dtype, and where precision leaks.

    The function is traced, never run, so you can pass shapes. Modules of Haiku, Equinox, Linen and
    NNX appear by their paths, other code by `jax.named_scope`. Proposed rules have been tried: the
    function was traced once more with the rule in its policy maps, for at most 12 rules.

    Args:
        fn: a loss, which is differentiated in its first argument: it returns a floating scalar, or
            a tuple that begins with one. Or a step that computes its own gradients. Any other
            function is audited as it is, without a gradient.
        platform: `"tpu"`, `"gpu"` (or `"cuda"`) or `"cpu"`, to also find the float32 matmuls that
            this hardware would multiply in fewer bits; None skips that check. In a
            `lax.platform_dependent`, the audit follows the branch of this platform, or with None
            that of this machine.

    Returns:
        A function that takes the arguments of `fn`, as arrays or `jax.ShapeDtypeStruct`s, and
        returns a `jmpx.inspect.Audit`: shares of FLOPs by dtype, bytes saved for the backward pass,
        casts, a table of modules, and findings, each with the line of your code and a rule to
        paste, or what to write there. In a test, call `report.check(...)`.

    See Also:
        `jmpx.inspect.ranges` runs the function once and measures the magnitudes of its values.

    Raises:
        TypeError: when called, if `fn` is not callable.
        ValueError: if the platform is unknown; when called, if `fn` is a loss whose first argument
            holds no floating array.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def loss_fn(params, x):
        ...     h = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        ...     return jnp.mean((h.astype(jnp.float32) @ params["head"]) ** 2)  # a leak
        >>> params = {"w": jax.ShapeDtypeStruct((64, 64), "float32"),
        ...           "head": jax.ShapeDtypeStruct((64, 8), "float32")}
        >>> report = jmpx.inspect.audit(loss_fn)(params, jax.ShapeDtypeStruct((32, 64), "float32"))
        >>> report.products[0].dtypes, report.products[0].flops
        ('bfloat16 x bfloat16', 524288)
    """
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"Unknown platform {platform!r}: expected 'tpu', 'gpu' or 'cpu'.")

    @functools.wraps(fn, updated=(), assigned=("__name__", "__qualname__", "__module__"))
    def run(*args: object, **kwargs: object) -> Audit:
        hardware = None if platform is None else _PLATFORMS[platform]
        graph = Graph(program := traced_program(fn, args, kwargs), hardware)
        return Audit(
            title=program.name,
            is_step=not program.is_differentiated,
            platform=hardware,
            products=summary.products(graph),
            saved=summary.saved(graph),
            casts=summary.casts(graph),
            scopes=summary.scopes(graph),
            findings=tried(graph, hardware),
            has_while=any(node.in_while for node in graph.nodes),
            uncounted=summary.uncounted(graph),
        )

    return run
