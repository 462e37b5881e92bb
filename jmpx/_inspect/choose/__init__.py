"""`choose`: the policy string with the fewest parts in float32 that holds a bound on the error.

- `islands.py` names the parts that a rule may put into float32, and what each costs in accuracy.
- `search.py` finds a small set of them: one compiled program rounds what a mask says, so a set is
  tried by a run, and not by another trace.
- `api.py` makes policies of the sets, measures the error of each as it is written, asks `plan` what
  it costs, and keeps those on the front; `report.py` shows them.

Masks are a model of a policy: they leave out what a rule casts at its edges. So what is printed was
measured under the policy itself.
"""
