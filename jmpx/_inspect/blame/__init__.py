"""`blame`: what each rounding of a program costs, as a share of the error that it makes.

- `points.py` runs a program in float32, and rounds where the program writes 16 bits: all of that,
  or what a mask says. It keeps the errors of the roundings, and charges them to the cotangents.
- `shares.py` makes shares of that, by module, scope or line, and measures by masks what is not the
  sum of independent roundings.
- `report.py` and `plot.py` show them; `api.py` is what users call.

The errors are those of the rounded run, because float32 would charge operations that are exact in
16 bits, and miss what gathers in a sum. The cotangents are those of the float32 run, because the
derivative at the rounded one may explode, as that of a difference of two means does.
"""
