"""A stage on this host: exact float32 or rounded weights, with compiled code where it is verified.

The stage runs consecutive layers step by step, and its K/V store has tables and pools of every cache
group. Rows of one token may run as whole layers in compiled code. Two modules measure this machine's
speed. `checks` proves exactness at start. Open the stage's module first.
"""
