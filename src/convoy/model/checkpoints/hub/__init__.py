"""Models on the Hugging Face hub: download files, stream byte ranges, and list the cache.

One module downloads one commit of a model, and its weights and text files alone. Others stream ranges of a
file, and fetch single tensors by the places that headers name. `describe` reads the headers alone. The cache
lists and removes the models that this machine keeps. Open the download of files first.
"""
