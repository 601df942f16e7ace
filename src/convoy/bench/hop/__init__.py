"""Measure a transfer between two processes of one machine: sealed twice, sealed once, or plain.

`pair` connects the two processes, `connection` opens their streams, and `carrier` runs the same tasks over
a link and over bare streams. `echo` is the second process, `delay` a longer wire, and `plain` the unsealed
reference, which nothing else may import. Open `hop` first.
"""
