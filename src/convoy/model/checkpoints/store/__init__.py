"""Parts of a model on this disk: received, digested and verified.

A part has its final name only once it is complete and its digest is right. A received model is a private
folder of such parts. Digests of this machine's own files are computed on several threads and remembered.
Open the module that writes parts first.
"""
