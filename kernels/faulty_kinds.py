"""On which kinds of calls the Triton kernels were found wrong; `triton_check` fills it, ranks can compare theirs.

A kind (dtype, sizes, rule, read-out, what is given) in FAULTY is left to the chunked path from the next call on.
"""

FAULTY: set[tuple] = set()
