"""Compute the memory of a stage, and check that its member has as much.

`memory` checks one stage in numbers that a person can compare, `blocks` chooses the number of K/V blocks
of each cache group that fits every member, and `working` sums the memory of a step. Open `memory` first.
"""
