"""Hold the coordinator's end of a provider: approval, proof of identity, connection and answers."""
