"""Serve a fleet of providers behind a coordinator. `coordinator`, `provider` and `proxy` are three programs.

They share only the modules beside this file and the `books`, and they meet over sockets.
"""
