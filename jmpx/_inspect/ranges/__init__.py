"""The ranges of a train step: how large and how small its numbers are, `jmpx.inspect.ranges`.

- `counting.py` runs the program once in float32, and counts the numbers of each scope in bins with
  the edges of four formats. So the losses in each format, at each loss scale, need no other run.
- `api.py` holds the public function and its report, as text and as a picture.
"""
