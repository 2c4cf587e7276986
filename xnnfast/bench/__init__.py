"""Measuring, comparing and profiling: from a model to figures, and from figures to a verdict.

=============== ===================================================================
worker          the process that measures; needs NumPy and some xnnfast, nothing else of this package
measure         starts workers, makes their inputs, collects what they say into a record
environment     what the machine is and does; whether it left a measurement alone
record          the file of a measurement; which two may be compared
stats           percentiles, Mann-Whitney test, bootstrap, the decision
compare         interleaved rounds until there is a verdict
costs, roofline arithmetic and bytes of a node; what this machine could do at best
profile, page   time per node; the same as Chrome trace and as a page of HTML
tables          all of that for a person at a terminal
=============== ===================================================================

Only ``stats`` and ``record`` are meant to be imported by programs; the rest serves the command line.
"""
