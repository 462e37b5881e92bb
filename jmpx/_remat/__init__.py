"""Saving memory in the backward pass, by `save=`: `jax.checkpoint` around the pieces of a jaxpr.

`remat` and the key `save` of a policy trace a function, and put checkpoints into its jaxpr. This
runs no equation and changes no dtype: a policy is applied before (by modules and by arguments) or
after (by operations). Read in this order:

- `remat.py` has `jmpx.remat`, the same for a function that a policy runs, and the pass that turns
  the equations of each piece into one equation.
- `cuts.py` finds the cuts, groups the equations of a jaxpr and of its inner jaxprs into pieces, and
  moves casts of inputs to their readers, so that no piece keeps the results of casts.
- `saving.py` tells which arrays a piece saves: the results of some products, and the residuals of
  functions with derivative rules, whose forward pass then runs once.

It imports only `_jaxprs` and `_base`.

How a jaxpr is cut:

- `cuts.py` looks for places where at most one activation is live: a floating array that depends on
  a product, is read later, is not small, and does not live through half of a long part, as an
  encoder's output does. A cut right after a product saves nothing more.
- Of these places it takes the cuts with the lowest peak of memory. The recomputed arrays of a piece
  are live together when its backward pass begins. The first pieces come last, when the products of
  later ones are freed, so the first pieces are the longest.
- Where a block repeats, as a layer does, there is one cut in each, always at the same place. Such
  pieces are equal and share a jaxpr, so JAX differentiates it once. Scopes around a whole piece,
  such as a layer's name, are around its equation. Layers that call a function with a derivative
  rule outside of `jax.jit` share nothing, because JAX makes a new rule for each call.
- A last product whose results are returned and larger than its operands, such as logits, is in no
  piece: the backward pass begins with their cotangent.
- A product with batch axes and one operand that is no activation, such as the weights of experts,
  is saved. A product of two activations is saved by `products+mixed` if it is no larger than the
  larger operand: the weighted values of an attention are, the scores are not.
- The policy of a checkpoint sees products as they run, after a `jax.vmap` around the function has
  changed them. So saved arrays get a name (`checkpoint_name`), and the policy asks for names. It
  also asks for shapes, because the user's derivative rules hold products that no jaxpr shows.
- Jitted functions, branches, loops and shard maps are cut in the same way; a function with a single
  piece joins the piece around it. The carry of a scan is an activation. A cut in its body keeps an
  array for each trip, so the best cuts are where the carry is kept anyway.
"""
