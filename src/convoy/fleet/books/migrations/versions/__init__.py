"""One module for each change of the coordinator's tables, in order.

Each has an `upgrade` from the version before. A version that was released is never edited: a later change
is a further module, with the next number in its name. Open the first one first.
"""
