"""Listen for HTTP: accept connections under limits, TLS, Host and Origin checks, paths, and the server's
options.
"""
