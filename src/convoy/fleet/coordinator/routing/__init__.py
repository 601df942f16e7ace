"""Choose a provider: pure decisions, without sockets or clocks of their own.

`dispatch` decides on admission, queues and retries. `route_request` describes a request by its needs,
`providers` holds all providers of a model as columns of numbers, `policy` chooses among them, and `queue`
orders the requests that wait. Open `dispatch` first.
"""
