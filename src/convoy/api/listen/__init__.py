"""Listen for HTTP: accept connections within limits, check TLS, Host, Origin and paths, and hold options."""
