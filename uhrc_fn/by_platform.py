"""Two forms of one function, chosen by the platform that a program is lowered for.

What is fast on a CPU is slow on a TPU and the other way round: the CPU vectorises
reductions over the major of two axes and likes few steps, the TPU pays a fixed price a
kernel. Both forms give equal results. `jax.lax.platform_dependent` would do the same
with a branch in the traced program, and a branch is what these programs must not have.
"""

import functools
from collections.abc import Callable

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir


def by_platform(default: Callable, *, tpu: Callable) -> Callable:
    """Make a function that is `tpu` in a program for a TPU and `default` elsewhere.

    Args:
      default: a pure function of arrays (or pytrees of them), by position.
      tpu: another form of it; its results have the same shapes and dtypes.

    Returns:
      A function of the same arguments.

    Raises:
      ValueError: while tracing, where the two forms return different things.
    """

    # Inlined in a program; called eagerly, it is compiled once for each shape.
    @functools.partial(jax.jit, inline=True)
    @functools.wraps(default)
    def chosen(*args):
        flat, structure = jax.tree.flatten(args)
        forms, results = {}, {}
        for name, form in (("default", default), ("tpu", tpu)):
            forms[name], results[name] = _traced(form, flat, structure)
        _check(default, results["default"], results["tpu"])
        out = _by_platform.bind(*flat, **forms)
        return jax.tree.unflatten(jax.tree.structure(results["default"]), out)

    return chosen


def _traced(form: Callable, flat: list, structure):
    """Trace a form: a closed jaxpr and the shapes of what it returns."""

    def of_leaves(*leaves):
        return form(*jax.tree.unflatten(structure, leaves))

    return jax.make_jaxpr(of_leaves, return_shape=True)(*flat)


def _check(function: Callable, default, tpu) -> None:
    """Refuse forms that return different things."""
    describe = lambda x: (x.shape, x.dtype)
    if jax.tree.map(describe, default) != jax.tree.map(describe, tpu):
        name = getattr(function, "__name__", str(function))
        raise ValueError(
            f"the forms of {name} return different things: the default "
            f"{default}, the one for a TPU {tpu}; wanted the same structure, shapes "
            "and dtypes. Change one of them."
        )


# Both forms are parameters, so that whoever searches a jaxpr finds both.
_by_platform = Primitive("by_platform")
_by_platform.multiple_results = True


@_by_platform.def_abstract_eval
def _results(*_, default, tpu):
    del tpu
    return default.out_avals


@_by_platform.def_impl
def _run(*args, **forms):
    return jax.jit(functools.partial(_by_platform.bind, **forms))(*args)


def _batch(args, axes, **forms):
    """Batch both forms alike; every result gets its batch axis in front."""
    batched = {
        name: jax.make_jaxpr(jax.vmap(jaxpr_as_fun(form), in_axes=axes))(*args)
        for name, form in forms.items()
    }
    results = _by_platform.bind(*args, **batched)
    return results, [0] * len(results)


batching.primitive_batchers[_by_platform] = _batch


def _lowering(name: str):
    """Lower one of the forms in place."""
    return mlir.lower_fun(
        lambda *args, **forms: jaxpr_as_fun(forms[name])(*args), multiple_results=True
    )


mlir.register_lowering(_by_platform, _lowering("default"))
mlir.register_lowering(_by_platform, _lowering("tpu"), platform="tpu")
