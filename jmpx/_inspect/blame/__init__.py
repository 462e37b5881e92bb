"""`blame`: the cost of each rounding of a program, as a share of the error that it makes.

- `runs.py` runs a program in float32, and rounds where the program writes 16 bits: everywhere, or
  as a mask says. It weights the error of each rounding with the cotangent there, and measures
  groups whose roundings are not independent by masks.
- `api.py` groups the costs by module, scope or line; it holds the public function and the report.

Errors come from the rounded run: the float32 run would blame operations that are exact in 16 bits,
and miss errors that accumulate in a sum. Cotangents come from the float32 run: at rounded values a
derivative may explode, such as the derivative of a difference of two means.
"""
