"""The overlay's self-check: ``python -m spark_overlay.verify``, on the GPU where there is one.

What serves is compared with what it is written after: the packed kernels with the torch reference
and with known answers, table rows with e4m3 by definition, attention with a plain computation in
float64. A line of JSON per check, a last one with the count, exit status 1 if one failed.
"""
