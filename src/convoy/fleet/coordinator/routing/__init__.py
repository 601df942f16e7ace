"""Choose a provider: the request's needs, the providers' columns, queues and the dispatcher."""
