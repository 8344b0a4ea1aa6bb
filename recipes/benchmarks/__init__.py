"""The measurements behind `python -m recipes.benchmark`: one experiment a file.

`operators` latency, memory and error at given shapes · `sweep` latency over T at constant B·T · `decode` one token
after a short and a long past. `contenders` is who is measured, `peers` how those that are not VLA are called, `ahead`
compiles their kernels beforehand, `measure` is how a call is measured, `machine` where, `record` keeps the results,
`request` is what can be asked.
"""
