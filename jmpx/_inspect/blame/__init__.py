"""`blame`: the cost of each rounding of a program, as a share of the error that it makes.

- `runs.py` runs a program in float32, and rounds where the program writes 16 bits: everywhere, or
  as a mask says. It charges the errors of the roundings to the cotangents, and measures by masks
  the groups whose roundings are not independent.
- `api.py` groups the costs by module, scope or line; it holds the public function and the report.

The errors are those of the rounded run: float32 would charge operations that are exact in 16 bits,
and miss errors that gather in a sum. The cotangents are those of the float32 run: at the rounded
one, a derivative may explode, as that of a difference of two means does.
"""
