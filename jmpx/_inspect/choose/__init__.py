"""`choose`: the policy string with the fewest parts in float32 that holds a bound on the error.

- `search.py` names the parts that a rule may put into float32, and finds a small set of them: one
  compiled program rounds as a mask says, so that a set is tried by a run, without another trace.
  Then it makes policy strings of the sets, and measures the error of each as it is written.
- `api.py` asks `plan` for the memory of each string; it holds the public function and the report.

Masks are a model of a policy: they leave out the casts at the edges of a rule. So all numbers in
the report were measured under the policies themselves.
"""
