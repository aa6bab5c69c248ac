"""`launch doctor`: what works between these ranks, and what to do about what does not.

A package of its own because gathering, judging and reporting are read, and tested, apart:

    base.py     what a check is: gathering on every rank, judging on one
    host.py     checks that a rank makes alone: versions, variables, limits, memory, disk, addresses, GPUs
    links.py    checks that ranks make together: clocks, ports, bandwidth and latency of every pair
    report.py   tables for people, JSON for programs
    run.py      all checks in order, each with its limit; the exit code
"""
