"""Serve a fleet of providers behind a coordinator. `coordinator`, `provider` and `proxy` are three programs.

They share only the modules beside this file, and they meet over sockets. The `books` are the coordinator's
database; the others use its prices alone.
"""
