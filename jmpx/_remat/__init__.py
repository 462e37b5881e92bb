"""What the backward pass keeps: `jax.checkpoint` around the pieces of a jaxpr, by `save=`.

`remat` and the key `save` of a policy trace a function, and put checkpoints into its jaxpr. No
equation runs in between, and no dtype changes: a policy is applied before, as by modules and by
arguments, or after, as by operations. The way through it:

- `remat.py` has `jmpx.remat`, the same for a function that a policy runs, and the pass, which makes
  one equation of the equations of each piece.
- `cuts.py` finds the cuts, groups the equations of a jaxpr, and of the jaxprs that it holds, into
  pieces, and moves the casts of inputs to their readers, so that no piece keeps the result.
- `saving.py` tells what is saved in a piece: the results of some products, and the residuals of
  functions with a backward pass of their own, whose forward pass runs once.

It imports only `_jaxprs` and `_base`.

How a jaxpr is cut:

- `cuts.py` looks for the places where one activation lives at most: a floating array that depends
  on a product, is read later, is not small, and does not live through half of a long part, as an
  encoder's output does. Right after a product nothing more is saved.
- Of these places it cuts at those that keep the peak of memory lowest. What a long piece computes
  again lives at once when its backward pass begins; that comes to the first pieces last, when the
  products of later ones are gone, so the first are the longest.
- Where a block repeats, as a layer does, there is one cut in each, always at the same place, and
  such pieces are equal, so that they share a jaxpr, of which JAX keeps the derivative. Scopes that
  are around a whole piece, such as a layer's name, are around its equation. Layers that call a
  function with a derivative rule outside of `jax.jit` share nothing: JAX makes one for each call.
- A last product whose results leave and are larger than what it reads, such as logits, is in no
  piece: the backward pass begins with their cotangent.
- A product of a batch of weights, such as the experts of a layer, is one of which one operand is no
  activation: it is saved. Of two activations, `products+mixed` saves a product that is no larger
  than the larger operand: the weighted values of an attention are, the scores are not.
- A policy of a checkpoint sees a product as it runs, which a `jax.vmap` around the function has
  changed. So what is saved gets a name (`checkpoint_name`), and the policy asks for names. It also
  asks for shapes, as derivative rules of the user hold products that no jaxpr shows.
- Jitted functions, branches, loops and shard maps are cut in the same way; a function of a single
  piece joins the piece around it. What a scan carries is an activation, and a cut in its body keeps
  its array for each turn, so that it is cut where that is kept anyway.
"""
