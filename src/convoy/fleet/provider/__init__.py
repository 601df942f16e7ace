"""Be a provider: dial a coordinator, prove oneself, and answer with the engine behind."""
